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

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// How connections are made.
#[derive(Clone, Debug)]
pub(super) enum Way {
    Network(HttpConnector),
    Socket(PathBuf),
}

/// An open connection.
pub(super) enum Line {
    Network(TokioIo<TcpStream>),
    Socket(TokioIo<UnixStream>),
}

impl Way {
    pub(super) fn network(patience: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(patience));
        connector.set_nodelay(true);
        Self::Network(connector)
    }
}

/// Connects through the descriptor of the directory, since the path of a socket may be longer than the
/// kernel accepts.
async fn connect(path: &Path) -> io::Result<UnixStream> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let directory = std::fs::File::open(directory)?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd())).join(name);
    UnixStream::connect(short).await
}

impl Service<Uri> for Way {
    type Response = Line;
    type Error = Failure;
    type Future = Pin<Box<dyn Future<Output = Result<Line, Failure>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        match self {
            Self::Network(connector) => connector.poll_ready(context).map_err(Into::into),
            Self::Socket(_) => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        match self {
            Self::Network(connector) => {
                let connecting = connector.call(uri);
                Box::pin(async move { Ok(Line::Network(connecting.await?)) })
            }
            Self::Socket(path) => {
                let path = path.clone();
                Box::pin(async move { Ok(Line::Socket(TokioIo::new(connect(&path).await?))) })
            }
        }
    }
}

impl Connection for Line {
    fn connected(&self) -> Connected {
        match self {
            Self::Network(stream) => stream.connected(),
            Self::Socket(_) => Connected::new(),
        }
    }
}

impl hyper::rt::Read for Line {
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

impl hyper::rt::Write for Line {
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
