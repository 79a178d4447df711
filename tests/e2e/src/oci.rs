//! Images made by the tests: a shell of this host and the files that a test adds.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

/// An image, with its layers from the bottom up.
#[derive(Clone, Debug)]
pub struct TestImage {
    layers: Vec<Vec<u8>>,
    settings: Value,
}

/// A file of a layer: its path, content, mode and owner.
pub type LayerFile<'a> = (&'a str, &'a [u8], u32, (u64, u64));

impl TestImage {
    /// An image with a shell, a few programs and a user `app`.
    pub fn with_shell() -> Self {
        let mut files = BTreeMap::new();
        for program in ["sh", "env", "id", "cat", "ls", "sleep", "stat"] {
            let path = ["/usr/bin", "/bin"].map(|directory| format!("{directory}/{program}"));
            let path = path.into_iter().find(|path| Path::new(path).exists()).expect("it is on every host");
            for library in shared_libraries(&path) {
                let inside = library.trim_start_matches("/usr").trim_start_matches('/').to_owned();
                files.insert(format!("usr/{inside}"), fs::read(&library).expect("a library can be read"));
            }
            files.insert(format!("usr/bin/{program}"), fs::read(&path).expect("a program can be read"));
        }
        let accounts = "root:x:0:0::/root:/bin/sh\napp:x:1234:1235::/srv/app:/bin/sh\n";
        let mut entries: Vec<LayerFile<'_>> =
            files.iter().map(|(path, content)| (path.as_str(), content.as_slice(), 0o755, (0, 0))).collect();
        entries.push(("etc/passwd", accounts.as_bytes(), 0o644, (0, 0)));
        entries.push(("etc/group", b"staff:x:50:\n", 0o644, (0, 0)));
        let links = [("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")];
        Self { layers: vec![build_layer(&entries, &links)], settings: json!({}) }
    }

    /// An image without layers.
    pub fn empty() -> Self {
        Self { layers: Vec::new(), settings: json!({}) }
    }

    /// Adds a layer with these files.
    pub fn with_layer(mut self, entries: &[LayerFile<'_>]) -> Self {
        self.layers.push(build_layer(entries, &[]));
        self
    }

    /// Adds a layer that was made elsewhere.
    pub fn with_raw_layer(mut self, archive: Vec<u8>) -> Self {
        self.layers.push(archive);
        self
    }

    /// Sets how the image is started, in the format of an image's configuration.
    pub fn with_settings(mut self, settings: Value) -> Self {
        self.settings = settings;
        self
    }

    /// The blobs by digest, and the manifest.
    pub fn blobs(&self) -> (BTreeMap<String, Vec<u8>>, Vec<u8>) {
        let mut blobs = BTreeMap::new();
        let mut add = |kind: &str, content: Vec<u8>| {
            let (digest, size) = (sha256_digest(&content), content.len());
            blobs.insert(digest.clone(), content);
            json!({"mediaType": format!("application/vnd.oci.image.{kind}"), "digest": digest, "size": size})
        };
        let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let contents: Vec<String> = self.layers.iter().map(|layer| sha256_digest(layer)).collect();
        let config = json!({
            "architecture": architecture, "os": "linux", "config": self.settings,
            "rootfs": {"type": "layers", "diff_ids": contents},
        });
        let config = add("config.v1+json", config.to_string().into_bytes());
        let layers: Vec<Value> =
            self.layers.iter().map(|layer| add("layer.v1.tar+gzip", gzip_content(layer))).collect();
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config, "layers": layers,
        });
        (blobs, manifest.to_string().into_bytes())
    }

    /// Writes the image as an OCI layout.
    pub fn write_layout(&self, directory: &Path) {
        let (mut blobs, manifest) = self.blobs();
        let entry = json!({"digest": sha256_digest(&manifest), "size": manifest.len()});
        blobs.insert(sha256_digest(&manifest), manifest);
        let place = directory.join("blobs/sha256");
        fs::create_dir_all(&place).expect("our own directory");
        for (digest, content) in blobs {
            fs::write(place.join(&digest["sha256:".len()..]), content).expect("our own directory");
        }
        let index = json!({"schemaVersion": 2, "manifests": [entry]}).to_string();
        fs::write(directory.join("index.json"), index).expect("our own directory");
        fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)
            .expect("our own directory");
    }

    /// Writes the image as `docker save` did before it supported layouts.
    pub fn save_docker_archive(&self, path: &Path) {
        let names: Vec<String> = (0..self.layers.len()).map(|place| format!("{place}/layer.tar")).collect();
        let (blobs, manifest) = self.blobs();
        let manifest: Value = serde_json::from_slice(&manifest).expect("our own words");
        let config = &blobs[manifest["config"]["digest"].as_str().expect("a digest is a text")];
        let list = json!([{"Config": "config.json", "RepoTags": null, "Layers": names}]).to_string();
        let mut entries: Vec<LayerFile<'_>> = names
            .iter()
            .zip(&self.layers)
            .map(|(name, layer)| (name.as_str(), layer.as_slice(), 0o644, (0, 0)))
            .collect();
        entries.push(("config.json", config, 0o644, (0, 0)));
        entries.push(("manifest.json", list.as_bytes(), 0o644, (0, 0)));
        fs::write(path, build_layer(&entries, &[])).expect("our own directory");
    }
}

/// `sha256:` and the hexadecimal digest.
pub fn sha256_digest(content: &[u8]) -> String {
    let mut hash = Sha256::new();
    hash.update(content);
    format!("sha256:{}", hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

/// An archive of files and links.
pub fn build_layer(entries: &[LayerFile<'_>], links: &[(&str, &str)]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    let header = |kind, mode, (uid, gid): (u64, u64), size| {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(uid);
        header.set_gid(gid);
        header.set_mtime(1_000_000);
        header.set_size(size);
        header
    };
    for (path, content, mode, owner) in entries {
        let kind = if path.ends_with('/') { EntryType::Directory } else { EntryType::Regular };
        let mut header = header(kind, *mode, *owner, content.len() as u64);
        builder.append_data(&mut header, path, *content).expect("memory can be written");
    }
    for (path, target) in links {
        let mut header = header(EntryType::Symlink, 0o777, (0, 0), 0);
        builder.append_link(&mut header, path, target).expect("memory can be written");
    }
    builder.into_inner().expect("memory can be written")
}

fn gzip_content(content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut encoder, content).expect("memory can be written");
    encoder.finish().expect("memory can be written")
}

/// The libraries that a program of this host loads when it starts.
fn shared_libraries(program: &str) -> Vec<String> {
    let reported = Command::new("ldd").arg(program).output().expect("there is ldd");
    let reported = String::from_utf8_lossy(&reported.stdout).into_owned();
    reported.split_whitespace().filter(|word| word.starts_with('/')).map(str::to_owned).collect()
}
