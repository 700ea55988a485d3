// SPDX-License-Identifier: GPL-2.0

//! What the core costs: two connections in one thread, no network, no payload.
//! `cargo run --release -p metaroce-sim --example speed [PART]`: PART 100 does a hundredth of the
//! work, for `valgrind --tool=callgrind`, whose instruction counts do not depend on the machine.

#![forbid(unsafe_code)]

use metaroce::proto::api::{
    Event, Host, Payload, Placed, Receive, RxInfo, SendWr, StreamId, Transmit, WrOp,
};
use metaroce::proto::connection::{Config, Connection, Ids};
use metaroce::proto::stream::{State, Stream, StreamAttr};
use metaroce::proto::wire::Packet;
use metaroce_sim::gid;

/// CPU time of this process in ns: other work on the machine does not count.
fn cpu_time() -> u64 {
    let text = std::fs::read_to_string("/proc/self/schedstat").expect("schedstat");
    text.split(' ')
        .next()
        .and_then(|t| t.parse().ok())
        .expect("a number")
}

struct Nobody;

impl Host for Nobody {
    fn bind_receive(&mut self, _: StreamId, _: u32) -> Option<u64> {
        None
    }
    fn receives_posted(&mut self, _: StreamId) -> Option<u32> {
        None
    }
    fn may_hold(&mut self, _: u32) -> bool {
        true
    }
}

struct End {
    core: Connection,
    done: u64,
    held: Vec<metaroce::proto::api::Token>,
}

fn end(me: usize, peer: usize) -> End {
    let mut cfg = Config::new(4200);
    cfg.seed = me as u64;
    let ids = Ids {
        local_cid: 1 + me as u64,
        local_gid: gid(me),
        remote_gid: gid(peer),
        dscp: 0,
    };
    let mut core = Connection::new(&cfg, ids, 1).expect("memory");
    let mut stream = Stream::new(256, 16).expect("memory");
    stream.set_attr(&StreamAttr {
        local_qpn: 10 + me as u32,
        remote_qpn: 10 + peer as u32,
        payload_mtu: 1024,
        window: 4096,
        timeout: 0,
        ..StreamAttr::default()
    });
    let spare = Connection::spare(1).expect("memory");
    let Ok((id, _)) = core.attach(1, stream, spare) else {
        panic!()
    };
    core.set_state(1, id, State::Rtr);
    core.set_state(1, id, State::Rts);
    End {
        core,
        done: 0,
        held: Vec::new(),
    }
}

impl End {
    fn events(&mut self, now: u64) {
        while let Some(e) = self.core.poll_event(now) {
            match e {
                Event::SendDone { .. } => self.done += 1,
                Event::Release(p) => self.held.push(p.token),
                _ => {}
            }
        }
        for t in std::mem::take(&mut self.held) {
            self.core.placed(now, t, Placed::Ok, &mut Nobody);
        }
    }
}

/// Moves up to a batch of packets from one end to the other.
fn step(now: u64, from: &mut End, to: &mut End, tx: &mut Transmit, packets: &mut u64) -> bool {
    let mut any = false;
    for _ in 0..16 {
        if !from.core.poll_transmit(now, tx) {
            break;
        }
        any = true;
        *packets += 1;
        let len = match tx.payload {
            Payload::None => 0,
            Payload::Send { len, .. } | Payload::Read { len, .. } | Payload::Pad { len } => len,
        };
        let p = Packet::parse(&tx.header[..usize::from(tx.header_len)]).expect("well-formed");
        let info = RxInfo {
            ce: false,
            plane: 0,
            payload_len: len,
        };
        if let Ok(Receive::Place(p)) = to.core.receive(now, &p, &info, &mut Nobody) {
            to.core.placed(now, p.token, Placed::Ok, &mut Nobody);
        }
    }
    if any {
        to.core.end_of_batch(now);
        to.events(now);
    }
    any
}

fn run(len: u32, count: u64, depth: u64) {
    let (mut a, mut b) = (end(0, 1), end(1, 0));
    let mut tx = Transmit::new();
    let mut now = 1_000_000_000u64;
    let (mut sent, mut acks) = (0, 0);
    let mut posted = 0;
    let start = cpu_time();
    while a.done < count {
        now += 10_000;
        while posted < a.done + depth {
            let wr = SendWr {
                op: WrOp::Write { va: 0, rkey: 1 },
                fence: false,
                solicited: false,
                signaled: true,
                length: len,
                error: None,
            };
            a.core.post_send(now, StreamId(0), wr).expect("room");
            posted += 1;
        }
        let x = step(now, &mut a, &mut b, &mut tx, &mut sent);
        let y = step(now, &mut b, &mut a, &mut tx, &mut acks);
        a.events(now);
        if !x && !y {
            now += 1_000_000;
            a.core.handle_timeout(now);
            b.core.handle_timeout(now);
        }
    }
    let ns = (cpu_time() - start) as f64;
    println!(
        "{len:>6} B: {:.0} ns per message, {:.0} ns per data packet (both ends), {:.2} acks per packet",
        ns / count as f64,
        ns / sent as f64,
        acks as f64 / sent as f64
    );
}

fn main() {
    let part = std::env::args().nth(1).map_or(1, |n| {
        let n: u64 = n.parse().expect("a number");
        n.max(1)
    });
    run(64, 2_000_000 / part, 1);
    run(64, 2_000_000 / part, 64);
    run(65536, 200_000 / part, 16);
    run(65536, 200_000 / part, 128);
}
