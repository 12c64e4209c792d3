"""The live page: what it remembers of each run, how viewers are told, and the page's own files."""
