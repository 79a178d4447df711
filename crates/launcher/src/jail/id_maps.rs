//! The id maps of a sandbox and of the host directories mounted into it.
//!
//! A sandbox's ids 0..65535 are `base`..`base + 65535` on the host. Layers and volumes have plain
//! ids on disk and are mounted with that same map. A host directory is different: its files belong
//! to real users. Its owner is mapped to the sandbox's default user, and user 1000 stays user 1000 if
//! that does not collide. Every other id inside is stored on disk as the sandbox's own host id, so
//! code inside cannot create files of a host user that is not mapped.

use std::io;

use linux::namespaces::IdMapExtent;

/// The number of ids of a sandbox.
pub(crate) const IDS_PER_SANDBOX: u32 = 65_536;

/// Returns the map of a sandbox whose ids begin at `base`.
pub(crate) fn sandbox_map(base: u32) -> Vec<IdMapExtent> {
    vec![IdMapExtent { inside: 0, outside: base, count: IDS_PER_SANDBOX }]
}

/// Returns the map for a host directory owned by `owner` that `user` owns inside. For an idmapped
/// mount "inside" is the id on disk and "outside" the id it appears as.
///
/// The numbers come from a plan and from the host's disk, so numbers that cannot be mapped are refused.
pub(crate) fn mount_map(base: u32, owner: u32, user: u32) -> io::Result<Vec<IdMapExtent>> {
    const ORDINARY_USER_ID: u32 = 1000;
    let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    if user >= IDS_PER_SANDBOX {
        return wrong(format!("uid or gid {user} does not exist in a sandbox"));
    }
    let Some(end) = base.checked_add(IDS_PER_SANDBOX) else {
        return wrong(format!("id range {base} has no room for {IDS_PER_SANDBOX} ids"));
    };
    if (base..end).contains(&owner) {
        return wrong(format!("owner {owner} is in the id range of the sandbox"));
    }
    let mut given = vec![(owner, user)];
    if owner != ORDINARY_USER_ID && user != ORDINARY_USER_ID {
        given.push((ORDINARY_USER_ID, ORDINARY_USER_ID));
    }
    given.sort_by_key(|(_, inside)| *inside);
    let mut extents: Vec<IdMapExtent> = given
        .iter()
        .map(|(disk, inside)| IdMapExtent { inside: *disk, outside: base + inside, count: 1 })
        .collect();
    // All ids between the mapped ones keep the sandbox's host id on disk.
    let mut next = 0;
    for until in given.iter().map(|(_, inside)| *inside).chain([IDS_PER_SANDBOX]) {
        if until > next {
            extents.push(IdMapExtent { inside: base + next, outside: base + next, count: until - next });
        }
        next = until + 1;
    }
    Ok(extents)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u32 = 2_000_000_000;

    fn appears_as(extents: &[IdMapExtent], disk: u32) -> Option<u32> {
        let hit = extents.iter().find(|e| (e.inside..e.inside + e.count).contains(&disk))?;
        Some(hit.outside + (disk - hit.inside) - BASE)
    }

    #[test]
    fn directory_of_root_keeps_root_and_user_1000() {
        let map = mount_map(BASE, 0, 0).expect("a map");
        assert_eq!(appears_as(&map, 0), Some(0));
        assert_eq!(appears_as(&map, 1000), Some(1000));
        assert_eq!(appears_as(&map, 33), None, "a host user that is not mapped has no id inside");
    }

    #[test]
    fn directory_of_user_1000_belongs_to_root_inside_and_root_on_disk_is_not_mapped() {
        let map = mount_map(BASE, 1000, 0).expect("a map");
        assert_eq!(appears_as(&map, 1000), Some(0));
        assert_eq!(appears_as(&map, 0), None);
        assert_eq!(
            appears_as(&map, BASE + 1000),
            Some(1000),
            "user 1000 inside has an id of its own on disk"
        );
    }

    #[test]
    fn ids_outside_of_the_range_are_refused() {
        for (base, owner, user) in
            [(BASE, 0, IDS_PER_SANDBOX), (BASE, 0, u32::MAX), (u32::MAX - 5, 0, 0), (BASE, BASE + 7, 0)]
        {
            mount_map(base, owner, user).expect_err("the id cannot be mapped");
        }
    }

    #[test]
    fn every_id_inside_has_exactly_one_id_on_disk() {
        for (owner, user) in [(0, 0), (1000, 0), (0, 1000), (1000, 1000), (501, 0), (65_534, 65_535)] {
            let map = mount_map(BASE, owner, user).expect("a map");
            let total: u32 = map.iter().map(|extent| extent.count).sum();
            assert_eq!(total, IDS_PER_SANDBOX, "{owner} {user}");
            let mut outside: Vec<(u32, u32)> = map.iter().map(|e| (e.outside, e.outside + e.count)).collect();
            outside.sort_unstable();
            assert!(outside.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{owner} {user}");
        }
    }
}
