// SPDX-License-Identifier: GPL-2.0

//! Hosts with real connections and streams on simulated links, in virtual time.
//!
//! Everything random comes from one seed: a run repeats exactly. The hosts do what the
//! kernel driver does (copies that take time, checksums, one timer), with byte vectors for
//! registered memory, so that tests can compare every byte.

#![forbid(unsafe_code)]

mod crc;
mod host;
mod net;
mod rng;
pub mod scale;

pub use crc::crc32c;
pub use host::{gid, gid_on, wr, write, Completion, Host, Note, Qp, QpSetup, Receive, Region};
pub use net::{Fabric, Link, LinkStats};
pub use rng::Rng;

use metaroce::proto::api::{Time, Token};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// One microsecond.
pub const US: Time = 1_000;
/// One millisecond.
pub const MS: Time = 1_000_000;
/// One second.
pub const S: Time = 1_000_000_000;

/// A packet on its way.
#[derive(Clone, Debug)]
pub struct Datagram {
    /// Sending host.
    pub from: usize,
    /// Receiving host.
    pub to: usize,
    /// Planes of the devices on which it leaves and arrives.
    pub planes: (u8, u8),
    /// Entropy.
    pub source_port: u16,
    /// Transport header and payload.
    pub bytes: Vec<u8>,
    /// May be fragmented by IP: a small MTU does not stop it.
    pub may_fragment: bool,
    /// Congestion was experienced.
    pub ce: bool,
}

#[derive(Debug)]
enum Work {
    Deliver(Datagram),
    /// A copy has ended.
    Placed {
        host: usize,
        conn: usize,
        token: Token,
        packet: Vec<u8>,
    },
    Timer {
        host: usize,
        conn: usize,
    },
    /// The receive batch of a host is over.
    BatchEnd {
        host: usize,
    },
}

struct Entry {
    at: Time,
    order: u64,
    work: Work,
}

impl PartialEq for Entry {
    fn eq(&self, o: &Self) -> bool {
        (self.at, self.order) == (o.at, o.order)
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, o: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(o))
    }
}
impl Ord for Entry {
    fn cmp(&self, o: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(o.at, o.order))
    }
}

/// The whole simulation.
pub struct Sim {
    /// Virtual time, ns.
    pub now: Time,
    /// Hosts.
    pub hosts: Vec<Host>,
    /// What is between them.
    pub fabric: Fabric,
    /// Source of everything random.
    pub rng: Rng,
    /// What happened, for the test to take.
    pub notes: VecDeque<(usize, Note)>,
    /// A copy takes up to this long.
    pub copy_time: Time,
    /// Packets that arrive within this time form a batch.
    pub batch_time: Time,
    /// Hosts stand still for up to this long and then work for up to this long; 0 is
    /// never. For tests that look after it.
    pub noise: Time,
    /// Prints each packet.
    pub trace: bool,
    queue: BinaryHeap<Reverse<Entry>>,
    order: u64,
    /// Things that happened at this time.
    stuck: u32,
}

impl Sim {
    /// A simulation without hosts. Prints its seed.
    pub fn new(seed: u64) -> Self {
        println!("seed {seed}");
        Self {
            now: S,
            hosts: Vec::new(),
            fabric: Fabric::new(),
            rng: Rng::new(seed),
            notes: VecDeque::new(),
            copy_time: 2 * US,
            batch_time: 0,
            noise: 0,
            trace: false,
            queue: BinaryHeap::new(),
            order: 0,
            stuck: 0,
        }
    }

    /// Adds a host and gives its index.
    pub fn add_host(&mut self) -> usize {
        let i = self.hosts.len();
        let seed = self.rng.next();
        self.hosts.push(Host::new(i, seed));
        i
    }

    fn schedule(&mut self, at: Time, work: Work) {
        self.order += 1;
        self.queue.push(Reverse(Entry {
            at: at.max(self.now),
            order: self.order,
            work,
        }));
    }

    /// Lets a host do what it has to do now: events, packets, timers.
    pub fn pump(&mut self, host: usize) {
        let now = self.now;
        for conn in 0..self.hosts[host].conns.len().max(1) {
            loop {
                let mut busy = false;
                while let Some(copy) = self.hosts[host].poll_event(now, conn, &mut self.notes) {
                    busy = true;
                    if let Some((token, packet)) = copy {
                        let at = now + self.rng.below(self.copy_time.max(1));
                        self.schedule(
                            at,
                            Work::Placed {
                                host,
                                conn,
                                token,
                                packet,
                            },
                        );
                    }
                }
                while let Some(d) = self.hosts[host].poll_transmit(now, conn) {
                    busy = true;
                    self.transmit(d);
                }
                if !busy {
                    break;
                }
            }
            if let Some(at) = self.hosts[host].timer_to_arm(self.now, conn) {
                self.schedule(at, Work::Timer { host, conn });
            }
        }
    }

    fn transmit(&mut self, d: Datagram) {
        if self.trace {
            let p = metaroce::proto::wire::Packet::parse(&d.bytes);
            println!(
                "{:>10} {}->{} :{} {:?}",
                self.now,
                d.from,
                d.to,
                d.source_port,
                p.map(|p| p.body().clone())
            );
        }
        if d.from == d.to {
            let at = self.now + 5 * US;
            self.schedule(at, Work::Deliver(d));
            return;
        }
        let now = self.now;
        let arrivals = self.fabric.send(now, d, &mut self.rng);
        if self.trace && arrivals.is_empty() {
            println!("{:>10} lost", self.now);
        }
        for (at, d) in arrivals {
            self.schedule(at, Work::Deliver(d));
        }
    }

    /// Does the next thing that is to happen until `end`. False when there is none.
    pub fn step(&mut self, end: Time) -> bool {
        match self.queue.peek() {
            Some(Reverse(e)) if e.at <= end => {}
            _ => {
                self.now = end;
                return false;
            }
        }
        let Some(Reverse(entry)) = self.queue.pop() else {
            return false;
        };
        self.stuck = if entry.at == self.now {
            self.stuck + 1
        } else {
            0
        };
        assert!(self.stuck < 100_000, "time stands still at {}", self.now);
        self.now = entry.at;
        let now = self.now;
        let host = match &entry.work {
            Work::Deliver(d) => d.to,
            Work::Placed { host, .. } | Work::Timer { host, .. } | Work::BatchEnd { host } => *host,
        };
        let until = self.hosts[host].stalled_until;
        if until > now {
            // The machine stands still: it all happens when it wakes up, in this order.
            self.schedule(until, entry.work);
            return true;
        }
        match entry.work {
            Work::Deliver(d) => {
                let to = d.to;
                if !self.hosts[to].is_on {
                    return true;
                }
                let copy = self.hosts[to].deliver(now, d);
                if let Some((conn, token, packet)) = copy {
                    let at = now + self.rng.below(self.copy_time.max(1));
                    self.schedule(
                        at,
                        Work::Placed {
                            host: to,
                            conn,
                            token,
                            packet,
                        },
                    );
                }
                if !self.hosts[to].in_batch {
                    self.hosts[to].in_batch = true;
                    let at = now + self.batch_time;
                    self.schedule(at, Work::BatchEnd { host: to });
                }
                self.pump(to);
            }
            Work::BatchEnd { host } => {
                self.hosts[host].in_batch = false;
                self.hosts[host].end_of_batch(now);
                self.pump(host);
            }
            Work::Placed {
                host,
                conn,
                token,
                packet,
            } => {
                self.hosts[host].copy(now, conn, token, &packet);
                self.pump(host);
            }
            Work::Timer { host, conn } => {
                self.hosts[host].timer(now, conn);
                self.pump(host);
            }
        }
        true
    }

    /// Runs until `end`, or until nothing is left to do.
    pub fn run_until(&mut self, end: Time) {
        while self.step(end) {}
    }

    /// Runs for `time`.
    pub fn run_for(&mut self, time: Time) {
        let end = self.now + time;
        self.run_until(end);
    }

    /// Connects QP numbers of two hosts: makes both QPs, ready to send.
    pub fn connect(&mut self, a: usize, b: usize, setup: &QpSetup) -> (usize, usize) {
        let psn = (self.rng.next() as u32, self.rng.next() as u32);
        let qa = self.hosts[a].make_qp(setup);
        let qb = self.hosts[b].make_qp(setup);
        let (na, nb) = (self.hosts[a].qps[qa].qpn, self.hosts[b].qps[qb].qpn);
        let now = self.now;
        self.hosts[a].ready(now, qa, b, nb, psn.0, psn.1, setup);
        self.hosts[b].ready(now, qb, a, na, psn.1, psn.0, setup);
        self.pump(a);
        self.pump(b);
        (qa, qb)
    }
}
