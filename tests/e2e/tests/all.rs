//! All.
mod limits {
    #[test]
    fn trivial() {
        assert!(std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists());
    }
}
