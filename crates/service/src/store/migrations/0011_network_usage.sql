-- Bytes that sandboxes exchanged through the filter of networks.
ALTER TABLE hours ADD COLUMN network_sent INTEGER NOT NULL DEFAULT 0;
ALTER TABLE hours ADD COLUMN network_received INTEGER NOT NULL DEFAULT 0;
