// SPDX-License-Identifier: GPL-2.0
//! TCP and UDP over the same link, for comparison.

#![forbid(unsafe_code)]

use crate::{bandwidth_values, latency_values, socket_address, Plan, Test, Values};
use selftests::oob::Oob;
use selftests::sys;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::Instant;

const GROUP: usize = 4;

fn any_address<T>(bind: impl Fn(&str) -> std::io::Result<T>) -> std::io::Result<T> {
    // A machine without IPv6 has only the second.
    bind("[::]:0").or_else(|_| bind("0.0.0.0:0"))
}

/// Runs one test; values on the leading end.
pub fn run(
    oob: &mut Oob,
    leads: bool,
    plan: &Plan,
    test: &Test,
    peer: Option<&str>,
) -> Result<Values, String> {
    inner(oob, leads, plan, test, peer).map_err(|e| e.to_string())
}

fn inner(
    oob: &mut Oob,
    leads: bool,
    plan: &Plan,
    test: &Test,
    peer: Option<&str>,
) -> std::io::Result<Values> {
    let values = match (test.name.as_str(), leads) {
        ("udp_lat", false) => {
            let socket = any_address(|a| UdpSocket::bind(a))?;
            socket.set_read_timeout(Some(plan.wait))?;
            oob.send_words(&[u64::from(socket.local_addr()?.port())])?;
            let mut buffer = vec![0; test.size.max(1)];
            loop {
                let (n, from) = socket.recv_from(&mut buffer)?;
                if buffer.first() == Some(&1) {
                    break;
                }
                socket.send_to(&buffer[..n], from)?;
            }
            Values::new()
        }
        ("udp_lat", true) => {
            let port = port_from(oob)?;
            let socket = any_address(|a| UdpSocket::bind(a))?;
            let target = socket_address(peer.unwrap_or("127.0.0.1"), port)?;
            // A socket of the target's family.
            let socket = if target.is_ipv4() { UdpSocket::bind("0.0.0.0:0")? } else { socket };
            socket.connect(target)?;
            socket.set_read_timeout(Some(plan.wait))?;
            let mut buffer = vec![0; test.size.max(1)];
            let groups = ping(plan, |_| {
                socket.send(&buffer)?;
                socket.recv(&mut buffer).map(|_| ())
            })?;
            let stop = vec![1; test.size.max(1)];
            socket.send(&stop)?;
            latency_values(groups, GROUP as f64 * 2.0)
        }
        (_, false) => {
            let listener = any_address(|a| TcpListener::bind(a))?;
            oob.send_words(&[u64::from(listener.local_addr()?.port())])?;
            let (mut stream, _) = listener.accept()?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(plan.wait))?;
            if test.name == "tcp_lat" {
                let mut buffer = vec![0; test.size.max(1)];
                while stream.read_exact(&mut buffer).is_ok() && buffer.first() != Some(&1) {
                    stream.write_all(&buffer)?;
                }
            } else {
                // Counts from the end of the warm-up, by the receiver's clock.
                let mut buffer = vec![0; 1 << 20];
                let begin = Instant::now();
                let (mut counted, mut from, mut last) = (0u64, None, begin);
                loop {
                    let n = stream.read(&mut buffer)?;
                    if n == 0 {
                        break;
                    }
                    last = Instant::now();
                    match from {
                        None if begin.elapsed() >= plan.warmup => from = Some(last),
                        None => {}
                        Some(_) => counted += n as u64,
                    }
                }
                let time = from.map_or(0, |from| last.duration_since(from).as_nanos() as u64);
                oob.send_words(&[counted, time])?;
            }
            Values::new()
        }
        (name, true) => {
            let port = port_from(oob)?;
            let mut stream = TcpStream::connect(socket_address(peer.unwrap_or("127.0.0.1"), port)?)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(plan.wait))?;
            let mut buffer = vec![0; test.size.max(1)];
            if name == "tcp_lat" {
                let groups = ping(plan, |_| {
                    stream.write_all(&buffer)?;
                    stream.read_exact(&mut buffer)
                })?;
                stream.write_all(&vec![1; test.size.max(1)])?;
                latency_values(groups, GROUP as f64 * 2.0)
            } else {
                let cpu = sys::cpu_time();
                let begin = Instant::now();
                while begin.elapsed() < plan.time + plan.warmup {
                    stream.write_all(&buffer)?;
                }
                let cpu =
                    (sys::cpu_time() - cpu).mul_f64(plan.time.as_secs_f64() / begin.elapsed().as_secs_f64());
                drop(stream);
                let words = oob.recv_words()?;
                let (bytes, ns) = (words.first().copied().unwrap_or(0), words.get(1).copied().unwrap_or(1));
                bandwidth_values(
                    bytes as f64,
                    bytes as f64 / test.size as f64,
                    std::time::Duration::from_nanos(ns),
                    cpu,
                )
            }
        }
    };
    oob.barrier("socket test done")?;
    Ok(values)
}

fn port_from(oob: &mut Oob) -> std::io::Result<u16> {
    let words = oob.recv_words()?;
    words
        .first()
        .and_then(|port| u16::try_from(*port).ok())
        .ok_or_else(|| std::io::Error::other("the other end named no port"))
}

/// Groups of round trips for the time of the plan, after as many for warming up.
fn ping(
    plan: &Plan,
    mut trip: impl FnMut(usize) -> std::io::Result<()>,
) -> std::io::Result<Vec<std::time::Duration>> {
    let begin = Instant::now();
    let mut groups = Vec::new();
    let mut at = begin;
    while at.duration_since(begin) < plan.warmup + plan.time {
        for i in 0..GROUP {
            trip(i)?;
        }
        let now = Instant::now();
        if now.duration_since(begin) > plan.warmup {
            groups.push(now.duration_since(at));
        }
        at = now;
    }
    Ok(groups)
}
