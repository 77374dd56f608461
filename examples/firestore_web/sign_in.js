// Who is using the page: the person named in config.json on the emulator, else whoever signs in with Google.
import { connectFirestoreEmulator } from "https://www.gstatic.com/firebasejs/12.19.0/firebase-firestore.js";

export async function signIn(app, db, emulator, form, say) {
  if (emulator) {
    connectFirestoreEmulator(db, emulator.host, emulator.port, { mockUserToken: emulator.user });
    return emulator.user.email;
  }
  const { getAuth, GoogleAuthProvider, signInWithPopup } =
    await import("https://www.gstatic.com/firebasejs/12.19.0/firebase-auth.js");
  const auth = getAuth(app);
  await auth.authStateReady();
  if (!auth.currentUser) {
    say("Press the button to sign in with Google");
    await new Promise((pressed) => { form.onsubmit = (event) => { event.preventDefault(); pressed(); }; });
    await signInWithPopup(auth, new GoogleAuthProvider()); // browsers open a window only after a click
  }
  return auth.currentUser.email;
}
