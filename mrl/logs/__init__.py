"""The logs page: what runs did, in a browser, from their stores alone."""
