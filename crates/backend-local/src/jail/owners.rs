//! Who owns what: the id maps of a sandbox and of the host directories mounted into it.
//!
//! A sandbox's ids 0..65535 are `base`..`base + 65535` on the host. Layers and volumes hold
//! plain ids on disk and are shown through that same map. A host directory is different: its
//! files belong to real users. Its owner becomes the sandbox's default user and back, and user
//! 1000 stays user 1000 if that does not collide; every other id inside is kept on disk as the
//! sandbox's own host id, so nothing inside can create a file of a host user it was not given.

use std::io;

use linux::namespaces::Extent;

/// How many ids a sandbox has.
pub const IDS: u32 = 65_536;

/// The map of a sandbox whose ids begin at `base`.
pub fn sandbox_map(base: u32) -> Vec<Extent> {
    vec![Extent { inside: 0, outside: base, count: IDS }]
}

/// The map through which a host directory owned by `owner` is shown, where `user` inside is to
/// own it. For an idmapped mount "inside" is the id on disk and "outside" the id it appears as.
///
/// The numbers come from a plan and from the host's disk, so one that has no place is refused.
pub fn mount_map(base: u32, owner: u32, user: u32) -> io::Result<Vec<Extent>> {
    const ORDINARY: u32 = 1000;
    let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    if user >= IDS {
        return wrong(format!("user {user} has no id in a sandbox"));
    }
    let Some(end) = base.checked_add(IDS) else {
        return wrong(format!("no {IDS} ids follow {base}"));
    };
    if (base..end).contains(&owner) {
        return wrong(format!("owner {owner} is one of the sandbox's own ids"));
    }
    let mut given = vec![(owner, user)];
    if owner != ORDINARY && user != ORDINARY {
        given.push((ORDINARY, ORDINARY));
    }
    given.sort_by_key(|(_, inside)| *inside);
    let mut extents: Vec<Extent> = given
        .iter()
        .map(|(disk, inside)| Extent { inside: *disk, outside: base + inside, count: 1 })
        .collect();
    // What lies between the given ids keeps its own host id on disk.
    let mut next = 0;
    for until in given.iter().map(|(_, inside)| *inside).chain([IDS]) {
        if until > next {
            extents.push(Extent { inside: base + next, outside: base + next, count: until - next });
        }
        next = until + 1;
    }
    Ok(extents)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u32 = 2_000_000_000;

    fn appears_as(extents: &[Extent], disk: u32) -> Option<u32> {
        let hit = extents.iter().find(|e| (e.inside..e.inside + e.count).contains(&disk))?;
        Some(hit.outside + (disk - hit.inside) - BASE)
    }

    #[test]
    fn a_directory_of_root_keeps_root_and_user_1000() {
        let map = mount_map(BASE, 0, 0).expect("a map");
        assert_eq!(appears_as(&map, 0), Some(0));
        assert_eq!(appears_as(&map, 1000), Some(1000));
        assert_eq!(appears_as(&map, 33), None, "a host user that was not given stays foreign");
    }

    #[test]
    fn a_directory_of_user_1000_belongs_to_root_inside_and_root_on_disk_stays_out_of_reach() {
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
    fn numbers_that_have_no_place_are_refused() {
        for (base, owner, user) in
            [(BASE, 0, IDS), (BASE, 0, u32::MAX), (u32::MAX - 5, 0, 0), (BASE, BASE + 7, 0)]
        {
            mount_map(base, owner, user).expect_err("it has no place");
        }
    }

    #[test]
    fn every_id_inside_has_exactly_one_id_on_disk() {
        for (owner, user) in [(0, 0), (1000, 0), (0, 1000), (1000, 1000), (501, 0), (65_534, 65_535)] {
            let map = mount_map(BASE, owner, user).expect("a map");
            let total: u32 = map.iter().map(|extent| extent.count).sum();
            assert_eq!(total, IDS, "{owner} {user}");
            let mut outside: Vec<(u32, u32)> = map.iter().map(|e| (e.outside, e.outside + e.count)).collect();
            outside.sort_unstable();
            assert!(outside.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{owner} {user}");
        }
    }
}
