"""Serve requests and files: scheduler, HTTP server, batch jobs, Ray."""
