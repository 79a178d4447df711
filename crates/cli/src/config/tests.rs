//! Tests for the settings that the configuration accepts, and for its errors.

use launcher::VolumeKind;

use super::*;

pub(super) fn parse_settings(text: &str) -> Result<Config> {
    Config::from_table(parse_config(text)?)
}

/// The value of a setting as `coracle config show` prints it.
fn shown_text(config: &Config, name: &str) -> String {
    let entries = config.entries();
    entries.iter().find(|entry| entry.name() == name).expect("it is listed").visible_text()
}

fn refusal_message(text: &str) -> String {
    format!("{:#}", parse_settings(text).expect_err("it must be refused"))
}

#[test]
fn an_empty_file_gives_the_defaults() {
    let config = parse_settings("").expect("defaults hold");
    assert_eq!(config.listen.to_string(), "127.0.0.1:8080");
    assert_eq!(config.limits.memory, Bytes::from_mib(1024));
    assert_eq!(config.uid_base, 1_879_048_192);
    assert_eq!(shown_text(&config, "lines"), "P");
    assert!(config.require_limits && !config.images.strict && config.api_key.is_none());
}

#[test]
fn every_setting_can_be_written() {
    let config = parse_settings(
        r#"
        listen = "0.0.0.0:80"
        state_dir = "/srv/coracle"
        api_key = "0123456789abcdef0123"
        public_address = "boxes.example.org:8443"
        trusted_proxies = ["10.0.0.7", "10.1.0.0/16"]
        instance = "blue"
        lines = "S"
        require_limits = false
        uid_base = 1000000
        free_space_floor = "2g"
        disks = "ext4"
        longest_timeout = "1d"
        images.strict = true
        images.aliases = { "python:3.12" = "debian" }
        limits = { memory = "256m", cpus = 0.5, pids = 64, disk = 104857600, max_memory = "1g", max_cpus = 2, max_pids = 64, max_disk = "10g", total_memory = "4g", total_cpus = 3, total_pids = 900, max_sandboxes = 10, max_commands = 5, max_snapshots = 7, max_volumes = 8, open_files_percent = 70, concurrent_requests = 20, concurrent_streams = 30, connections_per_address = 40, json_body = "1m" }
        prepared = { volumes = 0, namespaces = 3 }
        [[pool]]
        name = "warm"
        image = "debian"
        guest = "opensandbox"
        level = 5
        max = 50
        refill_per_second = 10
        refill_at_once = 1
        memory = "64m"
        cpus = 0.5
        pids = 32
        disk = "100m"
        network = "off"
        "#,
    )
    .expect("all is right");
    assert_eq!(config.state_dir, Path::new("/srv/coracle"));
    assert_eq!(config.api_key.as_ref().expect("a key").expose(), "0123456789abcdef0123");
    assert_eq!(shown_text(&config, "lines"), "S");
    assert_eq!(config.limits.cpus, MilliCpus(500));
    assert_eq!(config.disks.required_kind(), Some(VolumeKind::Ext4));
    assert_eq!(config.limits.disk, Bytes::from_mib(100));
    assert_eq!(config.limits.maxima.memory, Some(Bytes::from_mib(1024)));
    assert_eq!((config.limits.maxima.cpus, config.limits.maxima.pids), (Some(MilliCpus(2000)), Some(64)));
    assert_eq!(config.longest_timeout, Some(Duration::from_secs(86_400)));
    assert_eq!(config.images.aliases["python:3.12"], "debian");
    assert_eq!((config.prepared.volumes, config.prepared.namespaces), (0, 3));
    let pool = config.pools[0].to_pool(&config.fronts);
    assert_eq!((pool.name.as_str(), pool.template.image.as_str()), ("warm", "debian"));
    assert_eq!((pool.capacity.level, pool.capacity.most, pool.refill.per_second), (5, 50, 10));
    assert_eq!(pool.template.resources.memory, Some(Bytes::from_mib(64)));
}

#[test]
fn an_unknown_key_is_named_beside_the_known_ones() {
    let text = refusal_message("listn = \"127.0.0.1:1\"");
    assert!(text.contains("unknown field `listn`"), "{text}");
    assert!(text.contains("`listen`") && text.contains("`state_dir`"), "{text}");
    let text = refusal_message("[limits]\nmemry = \"1g\"");
    assert!(text.contains("unknown field `memry`") && text.contains("`memory`"), "{text}");
    assert!(text.contains("line 2"), "{text}");
}

#[test]
fn wrong_values_are_named_with_their_setting() {
    for (text, expected) in [
        ("listen = \"here\"", "`listen` is `here`"),
        ("lines = \"Q\"", "neither `P` nor `S`"),
        ("limits.memory = \"lots\"", "`limits.memory`: `lots` is not an amount"),
        ("limits.pids = 0", "`limits.pids` is 0"),
        ("limits.memory = \"1m\"", "less than the 4Mi that starting a process takes"),
        ("[[pool]]\nname = \"a\"\nlevel = 1\nmemory = \"1m\"", "below the minimum of 4Mi"),
        ("limits.max_pids = 0", "`limits.max_pids` is 0"),
        ("limits.max_memory = \"1m\"", "`limits.max_memory` is less than `limits.memory`"),
        ("limits.max_cpus = 0.5", "`limits.max_cpus` is less than `limits.cpus`"),
        ("limits.max_pids = 5", "`limits.max_pids` is less than `limits.pids`"),
        ("longest_timeout = \"soon\"", "`longest_timeout`"),
        ("instance = \"../x\"", "`instance` is `../x`"),
        ("api_key = \"short\"", "at least 16"),
        ("public_address = \"http://x\"", "without scheme"),
        ("trusted_proxies = [\"proxy.example\"]", "`trusted_proxies` is `proxy.example`"),
        ("limits.concurrent_streams = 0", "`limits.concurrent_streams` is 0"),
        ("disks = \"zfs\"", "`disks` is `zfs`"),
        ("uid_base = 1000", "among the host's own users"),
        ("uid_base = 4294900000", "leaves no room"),
        ("limits.max_sandboxes = 5000", "more than 4000"),
        ("limits.open_files_percent = 101", "more than 100"),
        ("prepared.volumes = 100000", "more than 256"),
        ("[[pool]]\nname = \"A\"\nlevel = 1", "lower-case"),
        ("[[pool]]\nname = \"a\"\nlevel = 2\nmax = 1", "exceeds the maximum"),
        ("[[pool]]\nname = \"a\"\nlevel = 1\nguest = \"box\"", "`pool.guest` of pool `a`"),
        ("[[pool]]\nname = \"a\"\nlevel = 1\nmemory = \"lots\"", "`pool.memory` of pool `a`"),
        ("[[pool]]\nname = \"a\"\nlevel = 1\n[[pool]]\nname = \"a\"\nlevel = 1", "two pools `a`"),
    ] {
        let found = refusal_message(text);
        assert!(found.contains(expected), "{text}: {found}");
    }
}

#[test]
fn a_key_is_never_printed() {
    let config = parse_settings("api_key = \"0123456789abcdef0123\"").expect("all is right");
    assert!(!format!("{config:?}").contains("0123456789abcdef"), "{config:?}");
    let complaint = refusal_message("api_key = \"sh\u{7}ort-secret-of-mine\"");
    assert!(!complaint.contains("secret"), "{complaint}");
}

#[test]
fn without_a_key_only_loopback_is_served() {
    let open = parse_settings("listen = \"0.0.0.0:80\"").expect("it parses");
    assert!(open.refuse_keyless_exposure().is_err());
    let keyed = parse_settings("listen = \"0.0.0.0:80\"\napi_key = \"0123456789abcdef\"").expect("it parses");
    assert!(keyed.refuse_keyless_exposure().is_ok());
    let local = parse_settings("listen = \"[::1]:80\"").expect("it parses");
    assert!(local.refuse_keyless_exposure().is_ok());
}

#[test]
fn former_name_of_a_state_directory_is_chosen_or_derived_from_its_path() {
    let former = |path: &str| state_dir_naming(None, Path::new(path)).former;
    assert_eq!(former("/a"), former("/a"));
    assert_ne!(former("/a"), former("/b"));
    assert!(check_instance(former("/a")).is_ok());
    assert_eq!(state_dir_naming(Some("blue".to_owned()), Path::new("/a")).former, "blue");
}

fn names(changes: &[SettingChange]) -> Vec<&str> {
    changes.iter().map(|change| change.name.as_str()).collect()
}

#[test]
fn reload_applies_changeable_settings_and_postpones_the_rest() {
    let old = parse_settings("listen = \"127.0.0.1:1\"\nlimits.pids = 64").expect("it parses");
    let read = parse_settings(
        "listen = \"127.0.0.1:2\"\nlimits = { pids = 65, json_body = \"2m\" }\nowners.a.sandboxes = 3\n\
         images.aliases = { \"x:1\" = \"host\" }\nlog = { level = \"debug\", format = \"json\" }",
    );
    let reload = old.reload(&read.expect("it parses")).expect("it is right");
    let applied = ["log.level", "limits.pids", "owners.a.sandboxes", "images.aliases.\"x:1\""];
    assert_eq!(names(&reload.applied), applied);
    assert_eq!(names(&reload.postponed), ["listen", "log.format", "limits.json_body"]);
    assert_eq!((reload.config.limits.pids, reload.config.listen.port()), (65, 1));
    assert!(reload.config.reload(&reload.config).expect("it is right").applied.is_empty());
}

#[test]
fn a_reload_shows_no_key() {
    let old = parse_settings("api_key = \"0123456789abcdef\"").expect("it parses");
    let new = parse_settings("api_key = \"fedcba9876543210\"").expect("it parses");
    let reload = old.reload(&new).expect("it is right");
    let [change] = &reload.applied[..] else { panic!("one setting changed") };
    assert_eq!((change.name.as_str(), &*change.from, &*change.to), ("api_key", "***", "***"));
}

#[test]
fn a_reload_that_would_open_the_server_is_refused() {
    let old = parse_settings("listen = \"0.0.0.0:80\"\napi_key = \"0123456789abcdef\"").expect("it parses");
    let new = parse_settings("listen = \"127.0.0.1:80\"").expect("it parses");
    let Err(error) = old.reload(&new) else { panic!("the address stays open to others") };
    assert!(error.to_string().contains("no API key"), "{error}");
}

#[test]
fn settings_survive_the_way_to_another_process() {
    let written = r#"
        api_key = "0123456789abcdef0123"
        instance = "blue"
        lines = "S"
        on_stop = "remove"
        free_space_floor = "2g"
        longest_timeout = "1d"
        images = { strict = true, max_bytes = "1g", aliases = { "python:3.12" = "debian" } }
        limits = { memory = "256m", cpus = 0.5, pids = 64, max_memory = "1g", max_cpus = 2, max_disk = "10g", total_memory = "4g", total_pids = 900, soft_sandboxes = 5 }
        gateway = { mode = "wildcard", domain = "boxes.example", keys = ["a=MDEyMzQ1Njc4OWFiY2RlZg=="] }
        output = { kept = "2m" }
        metrics = { per_owner = true }
        log = { level = "debug", format = "json" }
        network = { default = "off", allow = ["10.1.2.3:5432"] }
        owners = { ann = { memory = "1g", cpus = 2 } }
        pool = [{ name = "p", level = 2, memory = "64m" }]
    "#;
    for text in ["", written] {
        let config = parse_settings(text).expect("it is right");
        let bytes = serde_json::to_vec(&config).expect("settings are plain data");
        let passed: Config = serde_json::from_slice(&bytes).expect("it is what was written");
        let changes = entries::diff_configs(&config, &passed);
        assert!(changes.is_empty(), "{:?}", changes.first().map(|change| &change.name));
        assert_eq!((passed.naming, passed.api_key), (config.naming, config.api_key));
        assert_eq!(passed.volumes.host_paths, config.volumes.host_paths);
    }
}

#[test]
fn settings_of_fronts_may_be_written_in_their_section() {
    for text in [
        "lines = \"S\"\nrenewal_interval = \"90s\"",
        "[opensandbox]\nlines = \"S\"\nrenewal_interval = 90",
        "renewal_interval = \"1m30s\"\n[opensandbox]\nlines = \"S\"",
    ] {
        let config = parse_settings(text).expect(text);
        assert_eq!(shown_text(&config, "lines"), "S", "{text}");
        assert_eq!(shown_text(&config, "renewal_interval"), "90s", "{text}");
    }
    for section in ["gateway.keys", "opensandbox.route_keys"] {
        let config = parse_settings(&format!("{section} = [\"a=MDEyMzQ1Njc4OWFiY2RlZg==\"]")).expect(section);
        let shown = shown_text(&config, "gateway.keys");
        assert!(shown.contains("***") && !shown.contains("MDEy"), "{shown}");
    }
    let config = parse_settings("aio.api_key = \"k3y\"").expect("a key");
    assert_eq!(shown_text(&config, "aio.api_key"), "***");
    for (text, expected) in [
        ("aio.api_key = \"a b\"", "`aio.api_key` is not made of visible ASCII"),
        ("lines = \"S\"\n[opensandbox]\nlines = \"P\"", "are the same setting"),
        ("[opensandbox]\nline = \"S\"", "`opensandbox.line` is no setting"),
        ("[opensandbox]\nlines = \"Q\"", "`lines` is `Q`, neither `P` nor `S`"),
        ("lines = 1", "`lines` is integer, not text"),
        ("gateway.keys = [\"ab=MDEyMzQ1Njc4OWFiY2RlZg==\"]", "`gateway.keys` is not a list of keys"),
        ("gateway.keys = \"a\"", "`gateway.keys` is not a list of texts"),
        ("opensandbox.short_signatures = true", "`gateway.short_signatures` is true, but there are no keys"),
        ("gateway.short_signatures = 1", "`gateway.short_signatures` is integer, not true or false"),
        ("renewal_interval = \"soon\"", "`renewal_interval`: `soon` is not a duration"),
        ("opensandbox = 1", "`opensandbox` is not a section"),
        ("listen = 1\n[opensandbox]\nlines = \"S\"", "line 1: "),
        ("lines = \"S\"\nlinse = \"S\"", "line 2: unknown field `linse`"),
    ] {
        let message = refusal_message(text);
        assert!(message.contains(expected), "{text}: {message}");
    }
}
