-- Only hashes: a reader of this file cannot call the API. The former table was never written to.
DROP TABLE api_keys;
CREATE TABLE api_keys (
    id      TEXT PRIMARY KEY,
    hash    BLOB NOT NULL UNIQUE,
    owner   TEXT NOT NULL,
    created INTEGER NOT NULL,
    expires INTEGER
) STRICT;
