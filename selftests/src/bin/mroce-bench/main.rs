// SPDX-License-Identifier: GPL-2.0
//! mroce-bench: bandwidth, latency and message rate of an RDMA device, and TCP and UDP over
//! the same link, measured by the same program with the same clock.

#![forbid(unsafe_code)]

mod inet;
mod probe;
mod rdma;

use selftests::args::{self, Args};
use selftests::endpoint::{Device, Endpoint, Role};
use selftests::oob::Oob;
use std::net::ToSocketAddrs;
use std::time::{Duration, Instant};

const HELP: &str = "\
usage: mroce-bench --listen [ADDRESS:]PORT | --connect ADDRESS[:PORT] | --pair DEVICE[,DEVICE] [options]

Without a role, HOST=1 listens and any other HOST connects to the first of PEERS.

  --dev NAME --gid INDEX --ipv6   device and GID (defaults: RDMA_DEV, GID4 or GID6, or what fits)
  --tests LIST       comma-separated, each NAME[:SIZE[:DEPTH[:QPS]]] (sizes with k, m, g):
                       write_bw read_bw send_bw      bandwidth          (64k, depth 16, 1 QP)
                       write_rate send_rate          messages a second  (64, depth 128, 1 QP)
                       write_lat                     half round trip, the receiver polls memory  (64)
                       send_lat send_event_lat       half round trip, by CQ polling or by events (64)
                       read_lat                      full round trip    (64)
                       tcp_stream                    bandwidth          (64k a call)
                       tcp_lat udp_lat               half round trip, blocking sockets (64)
                     default: write_bw,read_bw,send_bw,write_lat,send_lat,write_rate,tcp_stream,tcp_lat
  --seconds N        time of each test (default 2; fractions allowed)
  --warmup N         seconds before the measurement of a bandwidth test (default a fifth of --seconds)
  --rounds N         the whole list that often (default 1)
  --tag WORD         repeated in each result line
  --timeout N        ACK timeout of the QPs, 4.096 us << N (default 14)
  --wait N           seconds without progress after which a test fails (default 30)
  --telemetry MS     in write_bw, read_bw, send_bw and the rates: sleeps between completions, looks
                     at the connection (metarocedv(7)) so often and adds to the result window_kb,
                     inflight_kb and srtt_us of its good paths and share_mbit (0: no limit), means
                     over time, and sent, resent, spurious, marked, cuts: what it counted

The connecting end prints one line a test:
  RESULT test=write_bw dev=mroce0 size=65536 depth=16 qps=1 seconds=2.00 MiBps=... Mbps=... msgps=... cpu=...
  RESULT test=write_lat dev=mroce0 size=64 n=... us_min=... us_p50=... us_p99=... us_mean=... us_max=...
gap_ms is the longest time without a completion. Latency is taken over groups of 4 round trips (reading the clock costs as much as a short
exchange); percentiles are those of the groups. cpu is the processor time of this end's
process a second, in processors; the kernel's softirq time is not in it. All options but role
and device are taken from the connecting end.
";

/// One test of the list.
#[derive(Clone, Debug)]
pub struct Test {
    /// Which one.
    pub name: String,
    /// Bytes of a message.
    pub size: usize,
    /// Requests in flight.
    pub depth: usize,
    /// QPs, each with that depth.
    pub qps: usize,
}

/// What a test may know.
pub struct Plan {
    /// Time of the measurement.
    pub time: Duration,
    /// Time before it.
    pub warmup: Duration,
    /// ACK timeout code.
    pub timeout: u8,
    /// Patience.
    pub wait: Duration,
    /// How often the leading end looks at its connection.
    pub telemetry: Option<Duration>,
}

/// Values of a result line.
pub type Values = Vec<(&'static str, f64)>;

fn parse_tests(text: &str) -> Vec<Test> {
    text.split(',')
        .map(|item| {
            let mut parts = item.split(':');
            let name = parts.next().unwrap_or_default().to_string();
            let (size, depth) = match name.as_str() {
                "write_bw" | "read_bw" | "send_bw" | "tcp_stream" => (65536, 16),
                "write_rate" | "send_rate" => (64, 128),
                "write_lat" | "send_lat" | "send_event_lat" | "read_lat" | "tcp_lat" | "udp_lat" => (64, 1),
                _ => args::usage(&format!("no test '{name}' (--help names them)")),
            };
            let mut number = |default: usize| match parts.next() {
                None | Some("") => default,
                Some(text) => match args::parse_size(text) {
                    Some(n) if n > 0 => n as usize,
                    _ => args::usage(&format!("'{item}': '{text}' is no number above 0")),
                },
            };
            Test { size: number(size), depth: number(depth), qps: number(1), name }
        })
        .collect()
}

/// Percentiles of group times, as values of a result line; `trips` is what a group holds, in
/// halves of round trips or whole ones, whatever one unit of the result is.
pub fn latency_values(mut groups: Vec<Duration>, trips: f64) -> Values {
    groups.sort_unstable();
    let us = |d: Duration| d.as_secs_f64() * 1e6 / trips;
    let at = |share: f64| {
        let i = ((groups.len() as f64 - 1.0) * share).round() as usize;
        groups.get(i).copied().map_or(0.0, us)
    };
    let mean = groups.iter().map(|d| us(*d)).sum::<f64>() / groups.len().max(1) as f64;
    vec![
        ("n", groups.len() as f64),
        ("us_min", at(0.0)),
        ("us_p50", at(0.5)),
        ("us_p99", at(0.99)),
        ("us_mean", mean),
        ("us_max", at(1.0)),
    ]
}

/// Values of a bandwidth result.
pub fn bandwidth_values(bytes: f64, messages: f64, time: Duration, cpu: Duration) -> Values {
    let s = time.as_secs_f64().max(1e-9);
    vec![
        ("seconds", s),
        ("MiBps", bytes / s / f64::from(1 << 20)),
        ("Mbps", bytes * 8.0 / s / 1e6),
        ("msgps", messages / s),
        ("cpu", cpu.as_secs_f64() / s),
    ]
}

fn is_inet(test: &Test) -> bool {
    test.name.starts_with("tcp_") || test.name.starts_with("udp_")
}

fn words_of(list: &[Test]) -> String {
    list.iter().map(|t| format!("{}:{}:{}:{}", t.name, t.size, t.depth, t.qps)).collect::<Vec<_>>().join(",")
}

enum Channel {
    /// With a device.
    Device(Box<Endpoint>),
    /// TCP and UDP only.
    Plain(Oob),
}

fn end(
    mut channel: Channel,
    leads: bool,
    given: &Plan,
    tests: &[Test],
    rounds: u64,
    tag: &str,
    peer: Option<String>,
) -> Result<(), String> {
    let text = |e: std::io::Error| e.to_string();
    // The connecting end's options hold.
    let own = format!(
        "{} {} {} {} {}",
        words_of(tests),
        given.time.as_micros(),
        given.warmup.as_micros(),
        given.timeout,
        rounds
    );
    let theirs = match &mut channel {
        Channel::Device(ep) => ep.oob().exchange_text(&own),
        Channel::Plain(oob) => oob.exchange_text(&own),
    }
    .map_err(text)?;
    let agreed = if leads { own } else { theirs };
    let mut words = agreed.split(' ');
    let mut word = || words.next().unwrap_or_default();
    let tests = parse_tests(word());
    let mut micros = || Duration::from_micros(word().parse().unwrap_or(1));
    let (time, warmup) = (micros(), micros());
    let timeout = word().parse().unwrap_or(14);
    let telemetry = given.telemetry.filter(|_| leads);
    let plan = Plan { time, warmup, timeout, wait: given.wait, telemetry };
    let rounds: u64 = word().parse().unwrap_or(1);
    let name = match &channel {
        Channel::Device(ep) => ep.context.name.clone(),
        Channel::Plain(_) => "none".into(),
    };
    for _ in 0..rounds {
        for test in &tests {
            let values = match &mut channel {
                Channel::Device(ep) if !is_inet(test) => rdma::run(ep, &plan, test),
                Channel::Device(ep) => inet::run(&mut ep.oob(), leads, &plan, test, peer.as_deref()),
                Channel::Plain(oob) => inet::run(oob, leads, &plan, test, peer.as_deref()),
            }
            .map_err(|e| format!("{}: {e}", test.name))?;
            if leads {
                let mut line = format!(
                    "RESULT test={} dev={} size={} depth={} qps={}",
                    test.name,
                    if is_inet(test) { "none" } else { &name },
                    test.size,
                    test.depth,
                    test.qps
                );
                if !tag.is_empty() {
                    line += &format!(" tag={tag}");
                }
                for (key, value) in values {
                    line += &if value == value.trunc() && value.abs() < 1e15 && key == "n" {
                        format!(" {key}={value:.0}")
                    } else {
                        format!(" {key}={value:.3}")
                    };
                }
                println!("{line}");
            }
        }
    }
    Ok(())
}

fn main() {
    let mut args = Args::from_env();
    if args.flag("--help") {
        print!("{HELP}");
        return;
    }
    let tests = parse_tests(&args.text("--tests").unwrap_or_else(|| {
        "write_bw,read_bw,send_bw,write_lat,send_lat,write_rate,tcp_stream,tcp_lat".into()
    }));
    let seconds: f64 = args.value("--seconds").unwrap_or(2.0);
    let warmup: f64 = args.value("--warmup").unwrap_or(seconds / 5.0);
    if !(seconds > 0.0 && seconds < 86_400.0 && (0.0..86_400.0).contains(&warmup)) {
        args::usage::<()>("--seconds and --warmup take times above 0 and below a day");
    }
    let plan = Plan {
        time: Duration::from_secs_f64(seconds),
        warmup: Duration::from_secs_f64(warmup),
        timeout: args.value("--timeout").unwrap_or(14),
        wait: Duration::from_secs(args.value("--wait").unwrap_or(30)),
        telemetry: args.value("--telemetry").map(|ms: u64| Duration::from_millis(ms.max(1))),
    };
    let rounds = args.value("--rounds").unwrap_or(1);
    let tag = args.text("--tag").unwrap_or_default();
    let device = Device::from_args(&mut args);
    let role = Role::from_args(&mut args);
    args.finish();
    let needs_device = tests.iter().any(|t| !is_inet(t));
    let open = |device: &Device, mut oob: Oob, leads: bool| -> Result<Channel, String> {
        // The listening end opens a device only when the list asks for one.
        let wants = oob.exchange(&[u64::from(needs_device)]).map_err(|e| e.to_string())?;
        let wants = if leads { needs_device } else { wants.first() == Some(&1) };
        if !wants {
            oob.set_timeout(Some((plan.wait + plan.time) * 4)).map_err(|e| e.to_string())?;
            return Ok(Channel::Plain(oob));
        }
        Endpoint::open(device, oob, leads, plan.wait + plan.time)
            .map(|ep| Channel::Device(Box::new(ep)))
            .map_err(|e| e.to_string())
    };
    let result = match &role {
        Role::Listen(addr) => Oob::listen(addr)
            .map_err(|e| e.to_string())
            .and_then(|oob| open(&device, oob, false))
            .and_then(|channel| end(channel, false, &plan, &tests, rounds, &tag, None)),
        Role::Connect(addr) => {
            let host = host_of(addr);
            Oob::connect(addr, Duration::from_secs(60))
                .map_err(|e| e.to_string())
                .and_then(|oob| open(&device, oob, true))
                .and_then(|channel| end(channel, true, &plan, &tests, rounds, &tag, Some(host)))
        }
        Role::Pair(a, b) => Oob::pair().map_err(|e| e.to_string()).and_then(|(left, right)| {
            let (first, second) = (device.named(a), device.named(b));
            std::thread::scope(|scope| {
                let other = scope
                    .spawn(|| end(open(&second, right, false)?, false, &plan, &tests, rounds, &tag, None));
                let mine = open(&first, left, true).and_then(|channel| {
                    end(channel, true, &plan, &tests, rounds, &tag, Some("127.0.0.1".into()))
                });
                let other = other.join().unwrap_or_else(|_| Err("the second end panicked".into()));
                mine.and(other)
            })
        }),
    };
    if let Err(error) = result {
        eprintln!("mroce-bench: {error}");
        std::process::exit(1);
    }
}

/// The address part of `ADDRESS[:PORT]`.
fn host_of(addr: &str) -> String {
    if let Some(end) = addr.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return end.0.to_string();
    }
    match addr.matches(':').count() {
        1 => addr.split(':').next().unwrap_or(addr).to_string(),
        _ => addr.to_string(),
    }
}

/// `host` with `port`, as the sockets want it.
pub fn socket_address(host: &str, port: u16) -> std::io::Result<std::net::SocketAddr> {
    (host, port)
        .to_socket_addrs()?
        .next()
        .ok_or_else(|| std::io::Error::other(format!("{host} has no address")))
}

/// Fails once nothing has moved for `patience`.
pub struct Watch {
    last: Instant,
    patience: Duration,
    idle: u32,
}

impl Watch {
    /// Starts now.
    pub fn new(patience: Duration) -> Self {
        Watch { last: Instant::now(), patience, idle: 0 }
    }

    /// Something moved.
    pub fn moved(&mut self) {
        self.idle = 0;
    }

    /// Nothing moved; lets others run now and then.
    pub fn idle(&mut self, what: &str) -> Result<(), String> {
        self.idle += 1;
        if self.idle % 256 == 1 {
            // The clock is read only when it is quiet for long.
            if self.idle == 1 {
                self.last = Instant::now();
            } else if self.last.elapsed() > self.patience {
                return Err(format!("{what}: nothing moved for {} s", self.patience.as_secs()));
            }
        }
        if self.idle % 16 == 0 {
            selftests::sys::yield_now();
        }
        Ok(())
    }
}
