"""What travels between processes: requests, replies, problems. Versioned by `/v1` in the path; imports only domain."""
