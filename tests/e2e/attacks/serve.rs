//! A service on a port whose behaviour is chosen by the request path.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

use crate::verdict::{Attempt, Verdict};

/// Answers each connection in its own thread, until it is killed.
pub(crate) fn serve(port: &str) -> Attempt {
    let port: u16 = port.parse().map_err(|error| format!("a port is a number: {error}"))?;
    let listener = TcpListener::bind(("127.0.0.1", port)).map_err(|error| format!("listen: {error}"))?;
    println!("listening");
    for stream in listener.incoming().flatten() {
        // A client that disconnects is not a failure.
        std::thread::spawn(move || answer(stream).ok());
    }
    Ok(Verdict::Succeeded("the listener was closed".to_owned()))
}

fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line == "\r\n" {
            break;
        }
        head.push(line.trim_end().to_owned());
    }
    let path = head.first().and_then(|line| line.split(' ').nth(1)).unwrap_or_default().to_owned();
    let length =
        head.iter().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
    match path.rsplit_once('/') {
        Some(("/zeros", count)) => {
            let count: u64 = count.parse().unwrap_or_default();
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {count}\r\n\r\n")?;
            std::io::copy(&mut std::io::repeat(0).take(count), &mut stream).map(|_| ())
        }
        Some(("", "count")) => {
            let taken = std::io::copy(&mut reader.take(length.unwrap_or_default()), &mut std::io::sink())?;
            plain(&mut stream, &taken.to_string())
        }
        Some(("", "silent")) => reader.read_to_end(&mut head.concat().into_bytes()).map(|_| ()),
        _ => plain(&mut stream, &head.join("\n")),
    }
}

fn plain(stream: &mut TcpStream, text: &str) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n", text.len())?;
    write!(stream, "Set-Cookie: a=1; Domain=boxes.test\r\n\r\n{text}")
}
