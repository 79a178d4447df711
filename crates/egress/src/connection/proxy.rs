//! A proxy of the operator's through which all connections leave: HTTP with CONNECT, or SOCKS5.
//!
//! It is asked for the address that was judged, never for a name, so it cannot resolve the name to another one.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use domain::DomainName;
use hickory_proto::rr::{RData, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::dial::connect_directly;
use crate::dns::upstream::UpstreamResolver;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(15);
const MAX_REPLY_BYTES: usize = 8 << 10;

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct UpstreamProxy {
    kind: ProxyKind,
    host: ProxyHost,
    port: u16,
    login: Option<ProxyLogin>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProxyKind {
    Http,
    Socks5,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ProxyHost {
    Name(DomainName),
    Address(IpAddr),
}

#[derive(Clone, PartialEq, Eq)]
struct ProxyLogin {
    user: String,
    password: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProxyError {
    #[error("a proxy is written as `http://HOST:PORT` or `socks5://HOST:PORT`")]
    Form,
    #[error("the name and password of a proxy have at most 255 characters each")]
    Login,
}

impl fmt::Debug for UpstreamProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The login is a secret.
        write!(f, "{:?} proxy {:?}:{}", self.kind, self.host, self.port)
    }
}

impl FromStr for UpstreamProxy {
    type Err = ProxyError;

    fn from_str(text: &str) -> Result<Self, ProxyError> {
        let (scheme, rest) = text.split_once("://").ok_or(ProxyError::Form)?;
        let kind = match scheme {
            "http" => ProxyKind::Http,
            "socks5" | "socks5h" => ProxyKind::Socks5,
            _ => return Err(ProxyError::Form),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (login, place) = match rest.rsplit_once('@') {
            Some((login, place)) => (Some(parse_login(login)?), place),
            None => (None, rest),
        };
        let (host, port) = place.rsplit_once(':').ok_or(ProxyError::Form)?;
        let port = port.parse().ok().filter(|port| *port != 0).ok_or(ProxyError::Form)?;
        let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        let host = match (bare.parse(), host.parse()) {
            (Ok(address), _) => ProxyHost::Address(address),
            (Err(_), Ok(name)) => ProxyHost::Name(name),
            (Err(_), Err(_)) => return Err(ProxyError::Form),
        };
        Ok(Self { kind, host, port, login })
    }
}

fn parse_login(text: &str) -> Result<ProxyLogin, ProxyError> {
    let (user, password) = text.split_once(':').unwrap_or((text, ""));
    let decode = |part: &str| decode_percent(part).filter(|part| part.len() <= 255).ok_or(ProxyError::Login);
    Ok(ProxyLogin { user: decode(user)?, password: decode(password)? })
}

fn decode_percent(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, more @ ..] = rest {
        rest = more;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, more) = more.split_at_checked(2)?;
        let digits = std::str::from_utf8(digits).ok().filter(|digits| !digits.starts_with('+'))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = more;
    }
    String::from_utf8(bytes).ok()
}

impl UpstreamProxy {
    /// Connects to an address through the proxy.
    pub(crate) async fn connect(
        &self,
        resolver: &UpstreamResolver,
        target: SocketAddr,
        position: u32,
    ) -> io::Result<TcpStream> {
        let address = SocketAddr::new(self.address(resolver).await?, self.port);
        let mut stream = connect_directly(address, position).await?;
        let handshake = async {
            match self.kind {
                ProxyKind::Http => connect_http(&mut stream, target, self.login.as_ref()).await,
                ProxyKind::Socks5 => connect_socks(&mut stream, target, self.login.as_ref()).await,
            }
        };
        tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await??;
        Ok(stream)
    }

    async fn address(&self, resolver: &UpstreamResolver) -> io::Result<IpAddr> {
        let name = match &self.host {
            ProxyHost::Address(address) => return Ok(*address),
            ProxyHost::Name(name) => name,
        };
        for record_type in [RecordType::A, RecordType::AAAA] {
            let found = resolver.lookup(name, record_type).await.unwrap_or_default();
            let address = found.iter().find_map(|record| match &record.data {
                RData::A(address) => Some(IpAddr::from(address.0)),
                RData::AAAA(address) => Some(IpAddr::from(address.0)),
                _ => None,
            });
            if let Some(address) = address {
                return Ok(address);
            }
        }
        Err(io::Error::other("the upstream proxy has no address"))
    }
}

async fn connect_http(
    stream: &mut TcpStream,
    target: SocketAddr,
    login: Option<&ProxyLogin>,
) -> io::Result<()> {
    let login = login.map_or_else(String::new, |login| {
        let encoded = encode_base64(format!("{}:{}", login.user, login.password).as_bytes());
        format!("Proxy-Authorization: Basic {encoded}\r\n")
    });
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{login}\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut reply = Vec::new();
    // One byte at a time: what follows the head belongs to the connection.
    while !reply.ends_with(b"\r\n\r\n") {
        if reply.len() >= MAX_REPLY_BYTES {
            return Err(io::Error::other("the reply of the upstream proxy is too long"));
        }
        reply.push(stream.read_u8().await?);
    }
    let status = reply.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
    if reply.starts_with(b"HTTP/1.") && status.len() == 3 && status.starts_with(b"2") {
        return Ok(());
    }
    let status = String::from_utf8_lossy(&status[..status.len().min(3)]).into_owned();
    Err(io::Error::other(format!("the upstream proxy refused with status {status}")))
}

/// See RFC 1928 and RFC 1929.
async fn connect_socks(
    stream: &mut TcpStream,
    target: SocketAddr,
    login: Option<&ProxyLogin>,
) -> io::Result<()> {
    const VERSION: u8 = 5;
    const NO_LOGIN: u8 = 0;
    const PASSWORD: u8 = 2;
    let method = if login.is_some() { PASSWORD } else { NO_LOGIN };
    stream.write_all(&[VERSION, 1, method]).await?;
    let mut chosen = [0; 2];
    stream.read_exact(&mut chosen).await?;
    if chosen != [VERSION, method] {
        return Err(io::Error::other("the upstream proxy wants another login"));
    }
    if let Some(login) = login {
        let mut message = vec![1];
        for part in [&login.user, &login.password] {
            message.push(u8::try_from(part.len()).map_err(io::Error::other)?);
            message.extend_from_slice(part.as_bytes());
        }
        stream.write_all(&message).await?;
        stream.read_exact(&mut chosen).await?;
        if chosen[1] != 0 {
            return Err(io::Error::other("the upstream proxy refused the login"));
        }
    }
    let mut request = vec![VERSION, 1, 0];
    match target.ip() {
        IpAddr::V4(v4) => {
            request.push(1);
            request.extend(v4.octets());
        }
        IpAddr::V6(v6) => {
            request.push(4);
            request.extend(v6.octets());
        }
    }
    request.extend(target.port().to_be_bytes());
    stream.write_all(&request).await?;
    let mut head = [0; 4];
    stream.read_exact(&mut head).await?;
    let length = match head[3] {
        1 => 4,
        4 => 16,
        3 => usize::from(stream.read_u8().await?),
        _ => return Err(io::Error::other("the reply of the upstream proxy is malformed")),
    };
    let mut bound = vec![0; length + 2];
    stream.read_exact(&mut bound).await?;
    match head[1] {
        0 => Ok(()),
        code => Err(io::Error::other(format!("the upstream proxy refused with code {code}"))),
    }
}

fn encode_base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let number = (0..3).fold(0, |number, at| number << 8 | u32::from(*chunk.get(at).unwrap_or(&0)));
        for at in 0..4 {
            let digit = usize::try_from(number >> (18 - 6 * at) & 63).unwrap_or(0);
            text.push(if at <= chunk.len() { char::from(DIGITS[digit]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[test]
    fn proxies_are_parsed_and_never_show_their_login() {
        let proxy: UpstreamProxy = "http://user:pa%40ss@proxy.example:3128".parse().expect("valid");
        assert_eq!(proxy.login.as_ref().expect("a login").password, "pa@ss");
        assert!(!format!("{proxy:?}").contains("ss"));
        assert!("socks5://[2001:db8::1]:1080/".parse::<UpstreamProxy>().is_ok());
        for wrong in [
            "",
            "proxy:80",
            "https://a.org:1",
            "http://a.org",
            "http://a.org:0",
            "http://a b:1",
            "http://x%:y@a.org:1",
        ] {
            assert!(wrong.parse::<UpstreamProxy>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn logins_are_encoded() {
        for (text, expected) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("user:pass", "dXNlcjpwYXNz")]
        {
            assert_eq!(encode_base64(text.as_bytes()), expected);
        }
    }

    /// Connects through a proxy that expects `request` and answers with `reply`.
    async fn exchange(scheme: &str, exchanges: Vec<(Vec<u8>, Vec<u8>)>) -> io::Result<()> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            for (request, reply) in exchanges {
                let mut seen = vec![0; request.len()];
                stream.read_exact(&mut seen).await.expect("a request");
                assert_eq!(String::from_utf8_lossy(&seen), String::from_utf8_lossy(&request));
                stream.write_all(&reply).await.expect("sent");
            }
            stream.write_all(b"hello").await.expect("sent");
        });
        let proxy: UpstreamProxy = format!("{scheme}127.0.0.1:{port}").parse().expect("valid");
        let target = "192.0.2.1:443".parse().expect("an address");
        let mut stream = proxy.connect(&UpstreamResolver::default(), target, 0).await?;
        let mut first = [0; 5];
        stream.read_exact(&mut first).await?;
        assert_eq!(&first, b"hello");
        server.await.expect("it does not panic");
        Ok(())
    }

    #[tokio::test]
    async fn address_is_reached_through_http() {
        let request = "CONNECT 192.0.2.1:443 HTTP/1.1\r\nHost: 192.0.2.1:443\r\nProxy-Authorization: Basic \
                       dTpw\r\n\r\n";
        let accepted = (request.into(), b"HTTP/1.1 200 OK\r\nX: y\r\n\r\n".to_vec());
        exchange("http://u:p@", vec![accepted]).await.expect("connected");
        let refused = (request.into(), b"HTTP/1.1 403 No\r\n\r\n".to_vec());
        let error = exchange("http://u:p@", vec![refused]).await.expect_err("refused");
        assert!(error.to_string().contains("403"), "{error}");
    }

    #[tokio::test]
    async fn address_is_reached_through_socks() {
        let request = [&[5, 1, 0, 1, 192, 0, 2, 1][..], &443_u16.to_be_bytes()].concat();
        let reply = vec![5, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        let plain = vec![(vec![5, 1, 0], vec![5, 0]), (request.clone(), reply.clone())];
        exchange("socks5://", plain).await.expect("connected");
        let login = [&[1, 1][..], b"u", &[1], b"p"].concat();
        let with_login = vec![(vec![5, 1, 2], vec![5, 2]), (login, vec![1, 0]), (request, reply)];
        exchange("socks5://u:p@", with_login).await.expect("connected");
    }
}
