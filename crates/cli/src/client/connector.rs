//! The connection to a server: over the network, or through the socket that its operators may open.

use std::future::Future;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream};
use tower::Service;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// How connections are made.
#[derive(Clone, Debug)]
pub(super) enum ServerConnector {
    Network(HttpConnector),
    Socket(PathBuf),
}

/// An open connection.
pub(super) enum ServerConnection {
    Network(TokioIo<TcpStream>),
    Socket(TokioIo<UnixStream>),
}

impl ServerConnector {
    pub(super) fn over_network(patience: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(patience));
        connector.set_nodelay(true);
        Self::Network(connector)
    }
}

/// Connects through the descriptor of the directory, since the path of a socket may be longer than the
/// kernel accepts.
async fn connect_unix_socket(path: &Path) -> io::Result<UnixStream> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let directory = std::fs::File::open(directory)?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd())).join(name);
    UnixStream::connect(short).await
}

impl Service<Uri> for ServerConnector {
    type Response = ServerConnection;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<ServerConnection, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        match self {
            Self::Network(connector) => connector.poll_ready(context).map_err(Into::into),
            Self::Socket(_) => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        match self {
            Self::Network(connector) => {
                let connecting = connector.call(uri);
                Box::pin(async move { Ok(ServerConnection::Network(connecting.await?)) })
            }
            Self::Socket(path) => {
                let path = path.clone();
                Box::pin(async move {
                    Ok(ServerConnection::Socket(TokioIo::new(connect_unix_socket(&path).await?)))
                })
            }
        }
    }
}

impl Connection for ServerConnection {
    fn connected(&self) -> Connected {
        match self {
            Self::Network(stream) => stream.connected(),
            Self::Socket(_) => Connected::new(),
        }
    }
}

impl hyper::rt::Read for ServerConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: hyper::rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Network(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Socket(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl hyper::rt::Write for ServerConnection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Network(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Socket(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Network(stream) => Pin::new(stream).poll_flush(context),
            Self::Socket(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Network(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Socket(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
