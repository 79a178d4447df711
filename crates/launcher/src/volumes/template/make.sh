#!/bin/sh
# Makes `pool.btrfs.zst`, the empty filesystem that every new pool starts from, so that a host
# needs no mkfs.btrfs. Needs mkfs.btrfs (btrfs-progs 6.2 or later) and zstd; no root.
#
# One copy of metadata is enough on a file; the other features are the defaults of btrfs-progs
# 6.2, all of them known to Linux 5.19. The identifier is replaced when a pool is made.
set -eu
cd "$(dirname "$0")"
image=$(mktemp)
trap 'rm -f "$image"' EXIT
truncate --size=48M "$image"
mkfs.btrfs --quiet --force --metadata single --data single --nodesize 16384 --sectorsize 4096 \
    --csum crc32c --features extref,skinny-metadata,no-holes --runtime-features free-space-tree \
    --label coracle "$image"
zstd --quiet --force --ultra -22 "$image" -o pool.btrfs.zst
