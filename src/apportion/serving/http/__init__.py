"""HTTP/1.1 on httptools, and the routes."""
