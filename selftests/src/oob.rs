// SPDX-License-Identifier: GPL-2.0
//! The control channel between two ends: framed lists of 64-bit words and texts over TCP,
//! or over a socket pair when both ends are threads of one process.

#![forbid(unsafe_code)]

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// One end of the control channel.
pub struct Oob {
    stream: Stream,
    /// What the peer said at the end of the current part, when that came early.
    ended: Option<String>,
}

/// First bytes of the frame that ends a part.
const END: &[u8] = b"!end ";

/// Port that the programs listen on unless told otherwise.
pub const PORT: u16 = 18515;

impl Oob {
    /// Waits for one peer on `addr` (`[ADDR:]PORT`).
    pub fn listen(addr: &str) -> io::Result<Self> {
        let addr = if addr.contains(':') { addr.to_string() } else { format!("[::]:{addr}") };
        let listener = match TcpListener::bind(&addr) {
            Ok(listener) => listener,
            // A machine without IPv6.
            Err(_) if addr.starts_with("[::]") => TcpListener::bind(addr.replace("[::]", "0.0.0.0"))?,
            Err(error) => return Err(error),
        };
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        Ok(Oob { stream: Stream::Tcp(stream), ended: None })
    }

    /// Connects to a listening peer, which may come up as late as `patience` from now.
    pub fn connect(addr: &str, patience: Duration) -> io::Result<Self> {
        let colons = addr.matches(':').count();
        let addr = match colons {
            0 => format!("{addr}:{PORT}"),
            1 => addr.to_string(),
            _ if addr.starts_with('[') => addr.to_string(),
            _ => format!("[{addr}]:{PORT}"),
        };
        let end = Instant::now() + patience;
        loop {
            let target = addr.to_socket_addrs()?.next().ok_or(io::ErrorKind::NotFound)?;
            match TcpStream::connect_timeout(&target, Duration::from_secs(5)) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    return Ok(Oob { stream: Stream::Tcp(stream), ended: None });
                }
                Err(error) if Instant::now() > end => {
                    return Err(io::Error::new(error.kind(), format!("{addr}: {error}")));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// Both ends of a channel inside this process.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = UnixStream::pair()?;
        Ok((Oob { stream: Stream::Unix(a), ended: None }, Oob { stream: Stream::Unix(b), ended: None }))
    }

    /// How long a receive may take before it fails.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match &self.stream {
            Stream::Tcp(s) => s.set_read_timeout(timeout),
            Stream::Unix(s) => s.set_read_timeout(timeout),
        }
    }

    /// Sends one frame.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut frame = Vec::with_capacity(bytes.len() + 4);
        frame.extend_from_slice(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
        frame.extend_from_slice(bytes);
        match &mut self.stream {
            Stream::Tcp(s) => s.write_all(&frame),
            Stream::Unix(s) => s.write_all(&frame),
        }
    }

    fn read_exact(&mut self, out: &mut [u8]) -> io::Result<()> {
        let result = match &mut self.stream {
            Stream::Tcp(s) => s.read_exact(out),
            Stream::Unix(s) => s.read_exact(out),
        };
        result.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                io::Error::new(io::ErrorKind::TimedOut, "the other end did not answer in time")
            }
            io::ErrorKind::UnexpectedEof => io::Error::new(error.kind(), "the other end is gone"),
            _ => error,
        })
    }

    /// Ends a part of the test on this end with `text` (empty: all was well) and gives what the
    /// other end says about it. Frames of the part that nobody took are dropped, so the next
    /// part starts clean on both ends even when one of them stopped half-way.
    pub fn end_part(&mut self, text: &str) -> io::Result<String> {
        self.send(&[END, text.as_bytes()].concat())?;
        loop {
            if let Some(theirs) = self.ended.take() {
                return Ok(theirs);
            }
            match self.recv() {
                Ok(_) => {}
                Err(_) if self.ended.is_some() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Receives one frame. An error when the peer has ended the part instead.
    pub fn recv(&mut self) -> io::Result<Vec<u8>> {
        let mut length = [0; 4];
        self.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > 64 << 20 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a control frame is too long"));
        }
        let mut bytes = vec![0; length];
        self.read_exact(&mut bytes)?;
        if let Some(text) = bytes.strip_prefix(END) {
            self.ended = Some(String::from_utf8_lossy(text).into_owned());
            return Err(io::Error::other("the other end stopped"));
        }
        Ok(bytes)
    }

    /// Sends own words and gives those of the peer.
    pub fn exchange(&mut self, words: &[u64]) -> io::Result<Vec<u64>> {
        self.send_words(words)?;
        self.recv_words()
    }

    /// Sends words.
    pub fn send_words(&mut self, words: &[u64]) -> io::Result<()> {
        self.send(&words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// Receives words.
    pub fn recv_words(&mut self) -> io::Result<Vec<u64>> {
        let bytes = self.recv()?;
        Ok(bytes.chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().unwrap_or([0; 8]))).collect())
    }

    /// Exchanges texts.
    pub fn exchange_text(&mut self, text: &str) -> io::Result<String> {
        self.send(text.as_bytes())?;
        Ok(String::from_utf8_lossy(&self.recv()?).into_owned())
    }

    /// Waits until the peer arrives at the same point; a different one is an error of the program.
    pub fn barrier(&mut self, point: &str) -> io::Result<()> {
        let other = self.exchange_text(point)?;
        if other != point {
            return Err(io::Error::other(format!("this end is at '{point}', the other one at '{other}'")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchange_between_threads() {
        let (mut a, mut b) = Oob::pair().unwrap();
        let t = std::thread::spawn(move || b.exchange(&[7, 8]).unwrap());
        assert_eq!(a.exchange(&[1]).unwrap(), [7, 8]);
        assert_eq!(t.join().unwrap(), [1]);
    }
}
