"""The bridge between a Firestore collection and Penstock: documents in, status and results out."""
