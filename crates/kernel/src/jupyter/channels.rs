//! The sockets to a Jupyter kernel.
//!
//! They are on the loopback of the sandbox, and each message is signed with a key that is known to
//! everyone who can read the connection file: the user that runs the code.

use std::fs::{OpenOptions, Permissions};
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::mpsc;
use zeromq::{DealerSendHalf, DealerSocket, Socket, SocketRecv, SocketSend, SubSocket};

use super::envelope::MessageSigner;
use super::message::JupyterMessage;

/// How many messages may wait to be read; beyond that the kernel blocks.
const MAX_QUEUED_MESSAGES: usize = 64;
/// The names of the ports in a connection file, in the order used here.
const PORT_FIELDS: [&str; 5] = ["shell_port", "iopub_port", "control_port", "stdin_port", "hb_port"];

/// The ports for a kernel, and the connection file that contains them. The file is removed with
/// this value.
#[derive(Debug)]
pub(super) struct ConnectionFile {
    ports: [u16; 5],
    key: String,
    directory: TempDir,
}

impl ConnectionFile {
    pub(super) fn create(name: &str) -> Result<Self> {
        let private = Permissions::from_mode(0o700);
        let directory = tempfile::Builder::new().prefix("coracle-kernel-").permissions(private).tempdir()?;
        let place = Self {
            ports: free_ports().context("there are no ports on the loopback")?,
            key: random_hex()?,
            directory,
        };
        let mut info = json!({
            "transport": "tcp",
            "ip": Ipv4Addr::LOCALHOST,
            "key": place.key,
            "signature_scheme": "hmac-sha256",
            "kernel_name": name,
        });
        for (name, port) in PORT_FIELDS.iter().zip(place.ports) {
            info[name] = Value::from(port);
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(place.path())?;
        file.write_all(&serde_json::to_vec(&info)?)?;
        Ok(place)
    }

    pub(super) fn path(&self) -> PathBuf {
        self.directory.path().join("connection.json")
    }

    /// Connects to the kernel, which may take some time to listen.
    pub(super) async fn connect_channels(&self) -> Result<KernelChannels> {
        let [shell_port, output_port, control_port, ..] = self.ports;
        let signer = MessageSigner::new(&self.key, random_hex()?);
        let mut shell = DealerSocket::new();
        shell.connect(&loopback_address(shell_port)).await?;
        let mut output = SubSocket::new();
        output.subscribe("").await?;
        output.connect(&loopback_address(output_port)).await?;
        let mut control = DealerSocket::new();
        control.connect(&loopback_address(control_port)).await?;
        let (shell, replies) = shell.split();
        let (replies, output) =
            (spawn_receiver(replies, signer.clone()), spawn_receiver(output, signer.clone()));
        Ok(KernelChannels { shell, control, signer, replies, output })
    }
}

fn loopback_address(port: u16) -> String {
    format!("tcp://{}:{port}", Ipv4Addr::LOCALHOST)
}

/// Ports that were free a moment ago; the connection file cannot reserve them.
fn free_ports() -> std::io::Result<[u16; 5]> {
    let listeners: Vec<TcpListener> =
        PORT_FIELDS.iter().map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<Result<_, _>>()?;
    let mut ports = [0; 5];
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

fn random_hex() -> Result<String> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The connection to a kernel that listens.
pub(super) struct KernelChannels {
    shell: DealerSendHalf,
    control: DealerSocket,
    signer: MessageSigner,
    /// Replies to requests.
    pub replies: mpsc::Receiver<JupyterMessage>,
    /// All other messages.
    pub output: mpsc::Receiver<JupyterMessage>,
}

impl KernelChannels {
    /// Sends a request only to see whether the kernel answers.
    pub(super) async fn request_kernel_info(&mut self) -> Result<()> {
        let (_, parts) = self.signer.sign_request("kernel_info_request", &json!({}));
        Ok(self.shell.send(parts).await?)
    }

    /// Requests that code is run; returns the id that messages about it will name.
    pub(super) async fn request_execution(&mut self, code: &str) -> Result<String> {
        let content = json!({
            "code": code,
            "silent": false,
            "store_history": true,
            "user_expressions": {},
            // The kernel cannot ask for input.
            "allow_stdin": false,
            "stop_on_error": true,
        });
        let (id, parts) = self.signer.sign_request("execute_request", &content);
        self.shell.send(parts).await?;
        Ok(id)
    }

    pub(super) async fn request_interrupt(&mut self) -> Result<()> {
        let (_, parts) = self.signer.sign_request("interrupt_request", &json!({}));
        Ok(self.control.send(parts).await?)
    }
}

/// Reads a socket in its own task, so that waiting for several sockets loses nothing.
fn spawn_receiver(
    mut socket: impl SocketRecv + Send + 'static,
    signer: MessageSigner,
) -> mpsc::Receiver<JupyterMessage> {
    let (sender, receiver) = mpsc::channel(MAX_QUEUED_MESSAGES);
    tokio::spawn(async move {
        while let Ok(parts) = socket.recv().await {
            // Messages that are malformed or not signed with our key are ignored.
            let Some(message) = signer.verify_message(&parts.into_vec()) else { continue };
            if sender.send(message).await.is_err() {
                return;
            }
        }
    });
    receiver
}
