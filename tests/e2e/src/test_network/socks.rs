//! The SOCKS5 proxy of the test internet, without authentication; see RFC 1928.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream};

use super::web;

const VERSION: u8 = 5;
const CONNECT: u8 = 1;

/// Serves one client: a CONNECT request, then bytes in both directions.
pub(super) fn serve_socks(mut client: TcpStream) -> io::Result<()> {
    let [_, methods] = read_array(&mut client)?;
    client.read_exact(&mut vec![0; usize::from(methods)])?;
    client.write_all(&[VERSION, 0])?;
    let [_, command, _, kind] = read_array(&mut client)?;
    let target = read_target(&mut client, kind)?;
    let connected = if command == CONNECT { web::connect_to(&target).ok() } else { None };
    let code = u8::from(connected.is_none());
    client.write_all(&[VERSION, code, 0, 1, 0, 0, 0, 0, 0, 0])?;
    connected.map_or(Ok(()), |server| carry_both_ways(client, server))
}

fn read_target(client: &mut TcpStream, kind: u8) -> io::Result<String> {
    let host = match kind {
        1 => IpAddr::from(Ipv4Addr::from(read_array::<4>(client)?)).to_string(),
        4 => format!("[{}]", Ipv6Addr::from(read_array::<16>(client)?)),
        _ => {
            let [length] = read_array(client)?;
            let mut name = vec![0; usize::from(length)];
            client.read_exact(&mut name)?;
            String::from_utf8_lossy(&name).into_owned()
        }
    };
    Ok(format!("{host}:{}", u16::from_be_bytes(read_array(client)?)))
}

fn read_array<const LENGTH: usize>(stream: &mut TcpStream) -> io::Result<[u8; LENGTH]> {
    let mut bytes = [0; LENGTH];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

pub(super) fn carry_both_ways(client: TcpStream, server: TcpStream) -> io::Result<()> {
    let (mut from_client, mut to_server) = (client.try_clone()?, server.try_clone()?);
    let up = std::thread::spawn(move || {
        io::copy(&mut from_client, &mut to_server).ok();
        to_server.shutdown(std::net::Shutdown::Write).ok();
    });
    let (mut from_server, mut to_client) = (server, client);
    io::copy(&mut from_server, &mut to_client).ok();
    to_client.shutdown(std::net::Shutdown::Write).ok();
    up.join().expect("copying does not panic");
    Ok(())
}
