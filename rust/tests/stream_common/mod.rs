// SPDX-License-Identifier: GPL-2.0

//! What the tests of streams share: numbers from a seed, a host, and a pair of streams that
//! a test drives packet by packet.

#![allow(dead_code)]

use metaroce::os::Box;
use metaroce::proto::api::*;
use metaroce::proto::stream::{BlockStatus, PacketRef, State, Stream, StreamAttr};
use metaroce::proto::wire::Drop;
use std::collections::VecDeque;

/// splitmix64: all randomness of a test, from its printed seed.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    /// True `percent` times in a hundred.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// The seeds a test runs with: those of the environment variable SEED, else `count` from
/// the clock-free default.
pub fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("SEED") {
        Ok(s) => vec![s.parse().expect("SEED is a number")],
        Err(_) => {
            let count = match std::env::var("SEEDS") {
                Ok(s) => s.parse().expect("SEEDS is a number"),
                Err(_) => count,
            };
            (1..=count).collect()
        }
    }
}

/// What the driver would do, with the answers in the open.
#[derive(Default)]
pub struct TestHost {
    /// Lengths of posted receives.
    pub receives: VecDeque<u64>,
    /// Numbers bound, in order.
    pub bound: Vec<u32>,
    pub hides_count: bool,
    pub refuses_to_hold: bool,
}

impl Host for TestHost {
    fn bind_receive(&mut self, _stream: StreamId, rmsn: u32) -> Option<u64> {
        let len = self.receives.pop_front()?;
        assert_eq!(rmsn, self.bound.len() as u32, "bound out of order");
        self.bound.push(rmsn);
        Some(len)
    }

    fn receives_posted(&mut self, _stream: StreamId) -> Option<u32> {
        (!self.hides_count).then_some(self.receives.len() as u32)
    }

    fn may_hold(&mut self, _bytes: u32) -> bool {
        !self.refuses_to_hold
    }
}

pub const MTU: u32 = 256;

pub fn attr(local: u32) -> StreamAttr {
    StreamAttr {
        local_qpn: local,
        remote_qpn: 3 - local,
        sq_psn: if local == 1 { 100 } else { 500 },
        rq_psn: if local == 1 { 500 } else { 100 },
        max_rd_atomic: 4,
        max_dest_rd_atomic: 4,
        timeout: 1_000_000,
        retry_cnt: 7,
        rnr_retry: 7,
        min_rnr_timer_us: 100,
        payload_mtu: MTU,
        window: 4096,
    }
}

pub fn wr(op: WrOp, length: u32) -> SendWr {
    SendWr {
        op,
        fence: false,
        solicited: false,
        signaled: true,
        length,
        error: None,
    }
}

pub fn write(va: u64, length: u32) -> SendWr {
    wr(WrOp::Write { va, rkey: 7 }, length)
}

pub fn read(va: u64, length: u32) -> SendWr {
    wr(WrOp::Read { va, rkey: 7 }, length)
}

pub fn send(length: u32) -> SendWr {
    wr(WrOp::Send, length)
}

pub fn fetch_add(va: u64, add: u64) -> SendWr {
    wr(WrOp::FetchAdd { va, rkey: 7, add }, 8)
}

/// A packet between the two streams of a [`Pair`].
#[derive(Clone, Copy, Debug)]
pub struct Packet {
    pub packet: PacketRef,
    pub header: StreamHeader,
    pub len: u32,
}

/// Streams 0 (the requester of most tests) and 1.
pub struct Pair {
    pub now: Time,
    pub streams: [Box<Stream>; 2],
    pub hosts: [TestHost; 2],
}

impl Pair {
    pub fn new() -> Self {
        Self::with(|_| {})
    }

    pub fn with(change: impl Fn(&mut StreamAttr)) -> Self {
        let mut pair = Self {
            now: 1_000,
            streams: [1, 2].map(|qpn| {
                let mut s = Stream::new(64, 16).expect("memory");
                let mut a = attr(qpn);
                change(&mut a);
                s.set_identity(StreamId(qpn), 1);
                s.set_attr(&a);
                s
            }),
            hosts: Default::default(),
        };
        for s in &mut pair.streams {
            s.set_state(1_000, State::Rtr);
            s.set_state(1_000, State::Rts);
            s.take_dirty();
        }
        pair
    }

    pub fn post(&mut self, wr: SendWr) -> u32 {
        self.streams[0].post(self.now, wr).expect("posted")
    }

    /// Everything that `from` can send now.
    pub fn packets(&mut self, from: usize) -> Vec<Packet> {
        let mut all = Vec::new();
        let mut header = StreamHeader::default();
        while let Some(packet) = self.streams[from].next_packet(self.now, u32::MAX, &mut header) {
            self.streams[from].sent(packet);
            all.push(Packet {
                packet,
                header,
                len: u32::from(packet.len),
            });
        }
        all
    }

    /// Hands a packet to `to`.
    pub fn deliver(&mut self, to: usize, p: &Packet) -> Result<Receive, Drop> {
        self.streams[to].receive(self.now, &p.header, p.len, &mut self.hosts[to])
    }

    /// Hands a packet to `to`, which places it at once.
    pub fn arrive(&mut self, to: usize, p: &Packet) {
        match self.deliver(to, p) {
            Ok(Receive::Place(placement)) => self.placed(to, &placement),
            Ok(Receive::Done) => {}
            other => panic!("{:?}: {other:?}", p.header),
        }
    }

    pub fn place(&mut self, to: usize, p: &Packet) -> Placement {
        match self.deliver(to, p) {
            Ok(Receive::Place(placement)) => placement,
            other => panic!("{:?}: {other:?}", p.header),
        }
    }

    pub fn hold(&mut self, to: usize, p: &Packet) -> Placement {
        match self.deliver(to, p) {
            Ok(Receive::Hold(placement)) => placement,
            other => panic!("{:?}: {other:?}", p.header),
        }
    }

    pub fn placed(&mut self, at: usize, p: &Placement) {
        self.placed_as(at, p, Placed::Ok);
    }

    pub fn placed_as(&mut self, at: usize, p: &Placement, result: Placed) {
        self.streams[at].placed(self.now, p.token, result, &mut self.hosts[at]);
    }

    pub fn events(&mut self, of: usize) -> Vec<Event> {
        std::iter::from_fn(|| self.streams[of].poll_event()).collect()
    }

    /// Both blocks of `from` arrive.
    pub fn acknowledge(&mut self, from: usize) {
        self.streams[from].take_dirty();
        for dir in [Direction::Request, Direction::Response] {
            let block = self.streams[from].block(dir);
            self.streams[1 - from].on_block(self.now, &block);
        }
    }

    pub fn status(&self, at: usize) -> BlockStatus {
        self.streams[at].block(Direction::Request).status
    }

    pub fn cumulative(&self, at: usize) -> u32 {
        self.streams[at].block(Direction::Request).cumulative
    }

    /// Statuses of the send queue's completions, which must come in order from `wr` on.
    pub fn completions(&mut self, of: usize, wr: u32) -> Vec<Status> {
        let mut next = wr;
        self.events(of)
            .into_iter()
            .filter_map(|e| match e {
                Event::SendDone { wr, status, .. } => {
                    assert_eq!(wr, next);
                    next += 1;
                    Some(status)
                }
                _ => None,
            })
            .collect()
    }
}
