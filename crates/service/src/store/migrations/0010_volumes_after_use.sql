-- How long a volume is kept after its last use, and when that was, both in microseconds. Volumes that are kept until they
-- are removed have neither; one that is in use has no time of its last use.
ALTER TABLE volumes ADD COLUMN keep_after_use INTEGER;
ALTER TABLE volumes ADD COLUMN unused_since INTEGER;
