// SPDX-License-Identifier: GPL-2.0
//! mroce-tap: a line between two network namespaces whose ends are TAP devices: as a veth pair, but
//! `ethtool -s NAME speed N` tells a device how fast it is.

#![forbid(unsafe_code)]

use selftests::args::{self, Args};
use selftests::sys::{self, Memory};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;

const HELP: &str = "\
usage: mroce-tap NAMESPACE/NAME NAMESPACE/NAME

Makes a TAP device NAME in each of the two namespaces of ip netns and carries what is sent over one
to the other, until it is killed; then both are gone. Root. Prints a line once they are there.
";

/// TUNSETIFF of linux/if_tun.h, and the flags IFF_TAP | IFF_NO_PI.
const TUNSETIFF: u64 = 0x4004_54ca;
const FLAGS: u64 = 0x1002;

/// Bytes of a frame at the most.
const FRAME: usize = 65_536 + 64;

/// Makes the device; the calling thread stays in its namespace.
fn make(namespace: &str, name: &str) -> io::Result<File> {
    sys::enter_netns(namespace)?;
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    // struct ifreq: the name, 16 bytes, and the flags.
    let mut request = [0u64; 5];
    if name.len() > 15 {
        return Err(io::Error::other("a name has 15 bytes at the most"));
    }
    for (i, byte) in name.bytes().enumerate() {
        request[i / 8] |= u64::from(byte) << (i % 8 * 8);
    }
    request[2] = FLAGS;
    sys::ioctl(file.as_raw_fd(), TUNSETIFF, &mut request, &[], &Memory::new(1)?)?;
    Ok(file)
}

/// Carries frames. A device that is down loses them, as a line does.
fn carry(mut from: &File, mut to: &File) -> io::Result<()> {
    let mut frame = vec![0; FRAME];
    loop {
        let n = from.read(&mut frame)?;
        let _ = to.write(&frame[..n]);
    }
}

fn run(ends: &[String]) -> io::Result<()> {
    let mut files = Vec::new();
    for end in ends {
        let Some((namespace, name)) = end.split_once('/') else {
            args::usage::<()>(&format!("'{end}' is not NAMESPACE/NAME"));
            continue;
        };
        let made = make(namespace, name);
        files.push(made.map_err(|e| io::Error::other(format!("{end}: {e}")))?);
    }
    let [a, b] = &files[..] else {
        return Err(io::Error::other("two ends are needed (--help)"));
    };
    println!("up");
    io::stdout().flush()?;
    std::thread::scope(|scope| {
        let back = scope.spawn(|| carry(b, a));
        carry(a, b).and(back.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked"))))
    })
}

fn main() {
    let mut args = Args::from_env();
    if args.flag("--help") {
        print!("{HELP}");
        return;
    }
    let ends = args.positionals();
    args.finish();
    if let Err(error) = run(&ends) {
        eprintln!("mroce-tap: {error}");
        std::process::exit(1);
    }
}
