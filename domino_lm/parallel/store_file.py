"""Where the launcher of a single node tells its ranks to meet."""

STORE_FILE = "DOMINO_LM_STORE_FILE"
"""The variable that names the file in which the ranks of a single node meet, instead of at a port."""
