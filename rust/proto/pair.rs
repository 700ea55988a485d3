// SPDX-License-Identifier: GPL-2.0

//! Two connections with a lossy link between them, without a simulator: what cargo and KUnit can
//! both run. Payload is not moved; what is placed is counted.

#![forbid(unsafe_code)]

use super::api::{Event, Host, Payload, Placed, Receive, RxInfo, SendWr, Status, StreamId};
use super::api::{Time, Transmit, WrOp};
use super::connection::{Config, Connection, Ids};
use super::stream::{State, Stream, StreamAttr};
use super::wire::Packet;
use crate::os::{try_box, Box, Vec};

/// Packets on a link at the most.
const ROOM: usize = 256;
/// How often the ends look around, which is also how long a packet takes, ns.
const STEP: Time = 10_000;
/// Receives that are there.
const RECEIVES: u32 = 64;

struct End {
    core: Box<Connection>,
    stream: StreamId,
    bound: u32,
    /// Requests done, all of them well.
    done: u32,
    received: u32,
    /// Bytes that were placed.
    placed: u64,
    up: bool,
}

struct Receives<'a>(&'a mut u32);

impl Host for Receives<'_> {
    fn bind_receive(&mut self, _: StreamId, rmsn: u32) -> Option<u64> {
        assert_eq!(rmsn, *self.0, "in order, once each");
        (*self.0 < RECEIVES).then(|| {
            *self.0 += 1;
            1 << 20
        })
    }

    fn receives_posted(&mut self, _: StreamId) -> Option<u32> {
        Some(RECEIVES - *self.0)
    }

    fn may_hold(&mut self, _: u32) -> bool {
        true
    }
}

impl End {
    fn new(own: u8, peer: u8, paths: u8) -> Self {
        let mut config = Config::new(4200);
        config.paths = paths;
        config.seed = u64::from(own);
        config.instance = u64::from(own);
        config.secret = [own; 16];
        let ids = Ids {
            local_cid: 0x1000 + u64::from(own),
            local_gid: [own; 16],
            remote_gid: [peer; 16],
            dscp: 0,
        };
        let core = Connection::new(&config, ids, 0).expect("memory");
        let mut core = try_box(core).expect("memory");
        let mut stream = Stream::new(64, 4).expect("memory");
        stream.set_attr(&StreamAttr {
            local_qpn: u32::from(own),
            remote_qpn: u32::from(peer),
            sq_psn: u32::from(own) << 8,
            rq_psn: u32::from(peer) << 8,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            timeout: 1_000_000_000,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer_us: 100,
            payload_mtu: config.payload_mtu(),
            ..StreamAttr::default()
        });
        let spare = Connection::spare(1).expect("memory");
        let Ok((id, _)) = core.attach(0, stream, spare) else {
            panic!("a new connection takes a stream");
        };
        core.set_state(0, id, State::Rtr);
        core.set_state(0, id, State::Rts);
        Self {
            core,
            stream: id,
            bound: 0,
            done: 0,
            received: 0,
            placed: 0,
            up: false,
        }
    }

    fn packet(&mut self, now: Time, tx: &Transmit) {
        let payload_len = match tx.payload {
            Payload::None => 0,
            Payload::Send { len, .. } | Payload::Read { len, .. } | Payload::Pad { len } => len,
        };
        let header = &tx.header[..usize::from(tx.header_len)];
        let packet = Packet::parse(header).expect("what the core writes it can read");
        let info = RxInfo {
            payload_len,
            ..RxInfo::default()
        };
        let mut host = Receives(&mut self.bound);
        if let Ok(Receive::Place(p)) = self.core.receive(now, &packet, &info, &mut host) {
            self.placed += u64::from(p.len);
            self.core.placed(now, p.token, Placed::Ok, &mut host);
        }
    }

    fn events(&mut self, now: Time) {
        while let Some(event) = self.core.poll_event(now) {
            match event {
                Event::SendDone { wr, status, .. } => {
                    assert_eq!((wr, status), (self.done, Status::Success));
                    self.done += 1;
                }
                Event::RecvDone { rmsn, status, .. } => {
                    assert_eq!((rmsn, status), (self.received, Status::Success));
                    self.received += 1;
                }
                Event::Read {
                    stream, request, ..
                } => self.core.read_ready(now, stream, request, Ok(())),
                Event::Atomic {
                    stream, request, ..
                } => self.core.atomic_done(now, stream, request, Ok(7)),
                Event::Release(p) => {
                    let mut host = Receives(&mut self.bound);
                    self.placed += u64::from(p.len);
                    self.core.placed(now, p.token, Placed::Ok, &mut host);
                }
                Event::ConnectionUp => self.up = true,
                Event::StreamError { .. } | Event::ConnectionFailed(_) => {
                    panic!("a fault that nobody made")
                }
                _ => {}
            }
        }
    }
}

struct Link {
    packets: Vec<Transmit>,
    used: usize,
    sent: u32,
    dropped: u32,
}

impl Link {
    fn new() -> Self {
        Self {
            packets: Vec::from_fn(ROOM, |_| Transmit::new()).expect("memory"),
            used: 0,
            sent: 0,
            dropped: 0,
        }
    }

    /// Takes what `end` has to send; each `loss`-th packet goes no further.
    fn fill(&mut self, end: &mut End, now: Time, loss: u32) {
        while let Some(slot) = self.packets.get_mut(self.used) {
            if !end.core.poll_transmit(now, slot) {
                return;
            }
            self.sent += 1;
            if self.sent % loss == 0 {
                self.dropped += 1;
            } else {
                self.used += 1;
            }
        }
    }
}

fn request(n: u32) -> SendWr {
    let (va, rkey) = (0x1000, 5);
    let (op, length) = match n % 4 {
        0 => (WrOp::Write { va, rkey }, 20_000 + n),
        1 => (WrOp::Send, 5000),
        2 => (WrOp::Read { va, rkey }, 9000),
        _ => (WrOp::FetchAdd { va, rkey, add: 1 }, 8),
    };
    SendWr {
        op,
        fence: n % 8 == 0,
        solicited: false,
        signaled: true,
        length,
        error: None,
    }
}

/// Both ends send 40 requests of all kinds to each other.
fn run(paths: u8, loss: u32) {
    const REQUESTS: u32 = 40;
    let mut ends = [End::new(1, 2, paths), End::new(2, 1, paths)];
    let mut links = [Link::new(), Link::new()];
    let mut bytes = 0;
    for n in 0..REQUESTS {
        let wr = request(n);
        bytes += u64::from(wr.length);
        for end in &mut ends {
            assert_eq!(end.core.post_send(0, end.stream, wr), Ok(n));
        }
    }
    let mut now = 0;
    while ends.iter().any(|e| e.done < REQUESTS) {
        now += STEP;
        assert!(now < 5_000_000_000, "requests are left after five seconds");
        let [a, b] = &mut ends;
        let [ab, ba] = &mut links;
        for (link, to) in [(&mut *ab, &mut *b), (&mut *ba, &mut *a)] {
            for tx in link.packets.iter().take(link.used) {
                to.packet(now, tx);
            }
            link.used = 0;
        }
        for (end, link) in [(a, ab), (b, ba)] {
            end.core.end_of_batch(now);
            if end.core.wake_at(now).is_some_and(|at| at <= now) {
                end.core.handle_timeout(now);
            }
            end.events(now);
            link.fill(end, now, loss);
        }
    }
    for (end, link) in ends.iter().zip(&links) {
        assert!(end.up);
        assert_eq!(end.received, REQUESTS / 4);
        // Each byte once: of the peer's Writes and Sends, and what was read.
        assert_eq!(end.placed, bytes);
        assert_eq!(link.dropped, link.sent / loss);
    }
}

#[cfg_attr(test, test)]
pub(crate) fn all_requests_on_a_good_link() {
    run(16, u32::MAX);
}

#[cfg_attr(test, test)]
pub(crate) fn all_requests_when_each_seventh_packet_is_lost() {
    run(16, 7);
    run(1, 7);
}
