"""The embedded English-German corpus, written by a small grammar."""
