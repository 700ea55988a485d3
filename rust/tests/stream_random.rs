// SPDX-License-Identifier: GPL-2.0

//! Random work over two streams that are joined by a channel which loses, reorders and
//! duplicates, checked against a model of RC semantics. SEED=n runs one seed, SEEDS=n that
//! many.
//!
//! The channel stands for the paths of a connection: what is lost is sent again under its
//! old number (or as VOID) until it has arrived and its acknowledgement too. Blocks may be
//! lost and overtake each other. Each copy takes time of its own and ends in random order.
//!
//! Checked at each step, not only at the end: a final packet of a Write is copied when
//! every byte ahead of it is in place; completions come in order, once, and not before the
//! bytes are where they belong; atomics run once; fences, limits and local work hold.

mod stream_common;

use metaroce::os::Box;
use metaroce::proto::api::*;
use metaroce::proto::stream::{PacketRef, State, Stream, StreamAttr, StreamBlock};
use metaroce::proto::wire::Drop;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque};
use stream_common::{seeds, Rng};

/// Registered memory: Writes and READs go here …
const DATA: usize = 8192;
/// … and atomics to the counters behind it.
const COUNTERS: usize = 8;
const MEMORY: usize = DATA + COUNTERS * 8;

#[derive(Clone, Copy, Debug)]
struct Config {
    loss: u64,
    duplication: u64,
    /// Longest time that a packet takes.
    delay: u64,
    /// Longest time that a copy takes.
    copy: u64,
    window: u32,
    mtu: u32,
    ops: usize,
    /// Percent of answers of `may_hold` that are no.
    no_hold: u64,
    relaxed: bool,
    /// Receives are posted late.
    scarce: bool,
    hides_count: bool,
    longest: u64,
    /// How far apart Writes go: few bytes make many overlap.
    spread: u64,
    /// An operation that fails, and how.
    failure: Option<Failure>,
    sends_only: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    BadKey,
    BadRead,
    BadAtomic,
    TooLong,
    BadLocal,
    ReceiveFault,
    LocalTarget,
    Invalidation,
}

fn config(rng: &mut Rng) -> Config {
    let small = rng.percent(30);
    Config {
        loss: rng.pick(&[0, 1, 10, 40]),
        duplication: rng.pick(&[0, 5, 30]),
        delay: rng.pick(&[1, 1_000, 100_000]),
        copy: rng.pick(&[0, 100, 50_000]),
        window: if small { rng.pick(&[4, 16]) } else { 4096 },
        mtu: rng.pick(&[64, 100, 256]),
        ops: 20 + rng.below(150) as usize,
        no_hold: rng.pick(&[0, 0, 20, 90]),
        relaxed: rng.percent(20),
        scarce: rng.percent(30),
        hides_count: rng.percent(30),
        longest: rng.pick(&[16, 300, 3000]),
        spread: rng.pick(&[64, 2000, DATA as u64]),
        failure: rng.percent(35).then(|| {
            rng.pick(&[
                Failure::BadKey,
                Failure::BadRead,
                Failure::BadAtomic,
                Failure::TooLong,
                Failure::BadLocal,
                Failure::ReceiveFault,
                Failure::LocalTarget,
                Failure::Invalidation,
            ])
        }),
        sends_only: rng.percent(15),
    }
}

/// A posted WR and what the model knows of it.
struct Op {
    wr: SendWr,
    /// Bytes that it sends.
    data: Vec<u8>,
    msn: Option<u32>,
    rmsn: Option<u32>,
    /// Bytes in place at the receiver of the message.
    placed: u32,
    /// READ, atomic or invalidation has acted (once).
    acted: bool,
    /// Memory of the peer in the model when all earlier ones had been done.
    snapshot: Vec<u8>,
    original: u64,
    /// READ: what arrived.
    result: Vec<u8>,
    value: u64,
    got: u32,
    completed: Option<Status>,
    begun: bool,
    fails: bool,
}

impl Op {
    fn takes_receive(&self) -> bool {
        matches!(
            self.wr.op,
            WrOp::WriteImm { .. } | WrOp::Send | WrOp::SendImm { .. } | WrOp::SendInv { .. }
        )
    }

    fn is_request(&self) -> bool {
        matches!(
            self.wr.op,
            WrOp::Read { .. } | WrOp::CompareSwap { .. } | WrOp::FetchAdd { .. }
        )
    }

    /// Whether all that the message does at its receiver is done.
    fn is_in_place(&self) -> bool {
        match self.wr.op {
            WrOp::Local => true,
            WrOp::Read { .. } | WrOp::CompareSwap { .. } | WrOp::FetchAdd { .. } => self.acted,
            WrOp::SendInv { .. } => self.placed == self.wr.length && self.acted,
            _ => self.placed == self.wr.length,
        }
    }
}

#[derive(Default)]
struct Receive_ {
    room: u64,
    data: Vec<u8>,
}

/// What a copy goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Memory,
    Receive,
    Answer,
}

fn kind(p: &Placement) -> (Kind, u32) {
    let kind = match p.target {
        Target::Remote { .. } => Kind::Memory,
        Target::Receive { .. } => Kind::Receive,
        Target::Request { .. } => Kind::Answer,
    };
    (kind, p.token.sseq)
}

struct End {
    stream: Box<Stream>,
    memory: Vec<u8>,
    ops: Vec<Op>,
    to_post: usize,
    next_done: u32,
    /// Receives: posted ones, then bound ones by number.
    posted: VecDeque<u64>,
    left_to_post: usize,
    bound: BTreeMap<u32, Receive_>,
    next_bound: u32,
    next_received: u32,
    held: HashMap<u32, Vec<u8>>,
    in_copy: HashSet<(Kind, u32)>,
    errors: Vec<Option<Fault>>,
    pinned: HashSet<u32>,
    established: u32,
    timer: Option<Time>,
    /// Outcome at this end as responder.
    local_told: Option<u32>,
    query: Option<Time>,
    flushes: u32,
    queue_full: bool,
}

#[derive(Clone)]
struct Flight {
    header: StreamHeader,
    payload: Vec<u8>,
}

enum Job {
    Arrive(Flight),
    /// Path acknowledgement for the packet.
    Released(PacketRef),
    Resend(PacketRef, u32),
    Block(StreamBlock),
    Copied(Placement, Vec<u8>),
    Timer,
    Post,
    PostReceive,
    Read(u32, u32),
    Atomic(u32),
    Invalidated(u32),
    LocalDone(u32),
    Query,
}

struct World {
    now: Time,
    rng: Rng,
    cfg: Config,
    ends: [End; 2],
    queue: BinaryHeap<Reverse<(Time, u64, usize)>>,
    jobs: HashMap<u64, Job>,
    next_job: u64,
    /// Atomics that a responder is asked to do: (end, request) → address, op.
    atomics: HashMap<(usize, u32), (u64, Opcode, u64, u64)>,
    steps: u64,
    last_event: Time,
}

struct Host_<'a> {
    posted: &'a mut VecDeque<u64>,
    bound: &'a mut BTreeMap<u32, Receive_>,
    next_bound: &'a mut u32,
    hides_count: bool,
    may_hold: bool,
}

impl Host for Host_<'_> {
    fn bind_receive(&mut self, _stream: StreamId, rmsn: u32) -> Option<u64> {
        assert_eq!(rmsn, *self.next_bound, "bound out of order");
        let room = self.posted.pop_front()?;
        *self.next_bound += 1;
        self.bound.insert(
            rmsn,
            Receive_ {
                room,
                data: vec![0; room as usize],
            },
        );
        Some(room)
    }

    fn receives_posted(&mut self, _stream: StreamId) -> Option<u32> {
        (!self.hides_count).then_some(self.posted.len() as u32)
    }

    fn may_hold(&mut self, _bytes: u32) -> bool {
        self.may_hold
    }
}

fn random_op(rng: &mut Rng, cfg: &Config) -> SendWr {
    let length = match rng.below(8) {
        0 => 0,
        1 => u64::from(cfg.mtu),
        2 => u64::from(cfg.mtu) + 1,
        3 => 8,
        _ => rng.below(cfg.longest + 1),
    } as u32;
    let va = rng.below(cfg.spread.min(DATA as u64 - u64::from(length)).max(1));
    let counter = DATA as u64 + 8 * rng.below(COUNTERS as u64);
    let op = match rng.below(if cfg.sends_only { 3 } else { 14 }) {
        0 => WrOp::Send,
        1 => WrOp::SendImm {
            imm: rng.next() as u32,
        },
        2 if cfg.sends_only => WrOp::Send,
        2 => WrOp::SendInv {
            rkey: 1000 + rng.below(1000) as u32,
        },
        3 => WrOp::WriteImm {
            va,
            rkey: 7,
            imm: rng.next() as u32,
        },
        4 | 5 => WrOp::Read { va, rkey: 7 },
        6 => WrOp::FetchAdd {
            va: counter,
            rkey: 7,
            add: rng.next(),
        },
        7 => WrOp::CompareSwap {
            va: counter,
            rkey: 7,
            compare: if rng.percent(50) { 0 } else { rng.next() },
            swap: rng.next(),
        },
        8 => WrOp::Local,
        _ => WrOp::Write { va, rkey: 7 },
    };
    let length = match op {
        WrOp::FetchAdd { .. } | WrOp::CompareSwap { .. } => 8,
        WrOp::Local => 0,
        _ => length,
    };
    SendWr {
        op,
        fence: rng.percent(15),
        solicited: rng.percent(30),
        signaled: rng.percent(50),
        length,
        error: None,
    }
}

/// Makes `wr` fail in the way that is wanted.
fn make_fail(rng: &mut Rng, cfg: &Config, failure: Failure) -> SendWr {
    let mut wr = random_op(rng, cfg);
    wr.length = 1 + rng.below(cfg.longest) as u32;
    wr.op = match failure {
        Failure::BadKey => WrOp::Write { va: 0, rkey: 666 },
        Failure::BadRead => WrOp::Read { va: 0, rkey: 666 },
        Failure::LocalTarget => WrOp::Read { va: 0, rkey: 7 },
        Failure::BadAtomic => {
            wr.length = 8;
            WrOp::FetchAdd {
                va: DATA as u64,
                rkey: 666,
                add: 1,
            }
        }
        Failure::TooLong | Failure::ReceiveFault => WrOp::Send,
        Failure::BadLocal => {
            wr.length = 0;
            WrOp::Local
        }
        Failure::Invalidation => WrOp::SendInv { rkey: 666 },
    };
    wr
}

fn le(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng(seed);
        let cfg = config(&mut rng);
        let both = rng.percent(50);
        let psn = [rng.next() as u32, u32::MAX - rng.below(200) as u32];
        let mut end = |i: usize| {
            let mut stream = Stream::new(16, 4).expect("memory");
            stream.set_identity(StreamId(i as u32), 9);
            let limit = 1 + rng.below(4) as u32;
            stream.set_attr(&StreamAttr {
                local_qpn: 10 + i as u32,
                remote_qpn: 11 - i as u32,
                sq_psn: (psn[i] & 0xff_ffff) | (u32::from(seed % 2 == 0) * 0xff00_0000),
                rq_psn: (psn[1 - i] & 0xff_ffff) | (u32::from(seed % 2 == 0) * 0xff00_0000),
                max_rd_atomic: limit,
                max_dest_rd_atomic: 4,
                timeout: 1_000_000_000,
                retry_cnt: 7,
                rnr_retry: 7,
                min_rnr_timer_us: 50,
                payload_mtu: cfg.mtu,
                window: cfg.window,
            });
            stream.set_state(0, State::Rtr);
            stream.set_state(0, State::Rts);
            let count = if i == 0 || both { cfg.ops } else { 0 };
            let mut ops: Vec<SendWr> = (0..count).map(|_| random_op(&mut rng, &cfg)).collect();
            let mut failing = None;
            if let (0, Some(failure)) = (i, cfg.failure) {
                let at = rng.below(count as u64) as usize;
                ops[at] = make_fail(&mut rng, &cfg, failure);
                failing = Some(at);
            }
            End {
                stream,
                memory: vec![0; MEMORY],
                ops: ops
                    .into_iter()
                    .enumerate()
                    .map(|(n, wr)| Op {
                        wr,
                        data: (0..wr.length).map(|_| rng.next() as u8 | 1).collect(),
                        msn: None,
                        rmsn: None,
                        placed: 0,
                        acted: false,
                        snapshot: Vec::new(),
                        original: 0,
                        result: vec![0; wr.length as usize],
                        value: 0,
                        got: 0,
                        completed: None,
                        begun: false,
                        fails: failing == Some(n),
                    })
                    .collect(),
                to_post: 0,
                next_done: 0,
                posted: VecDeque::new(),
                left_to_post: 0,
                bound: BTreeMap::new(),
                next_bound: 0,
                next_received: 0,
                held: HashMap::new(),
                in_copy: HashSet::new(),
                errors: Vec::new(),
                pinned: HashSet::new(),
                established: 0,
                timer: None,
                local_told: None,
                query: None,
                flushes: 0,
                queue_full: false,
            }
        };
        let mut ends = [end(0), end(1)];
        // The numbers that the streams will use, and the model's memory after each.
        for i in 0..2 {
            let (mut msn, mut rmsn) = (0, 0);
            let mut memory = vec![0u8; MEMORY];
            let mut needed = 0;
            for op in &mut ends[i].ops {
                if op.wr.op != WrOp::Local {
                    op.msn = Some(msn);
                    msn += 1;
                }
                if op.takes_receive() {
                    op.rmsn = Some(rmsn);
                    rmsn += 1;
                    needed += 1;
                }
                match op.wr.op {
                    WrOp::Write { va, .. } | WrOp::WriteImm { va, .. } => {
                        memory[va as usize..][..op.data.len()].copy_from_slice(&op.data);
                    }
                    WrOp::FetchAdd { va, add, .. } => {
                        let at = va as usize;
                        op.original = le(&memory[at..]);
                        let new = op.original.wrapping_add(add);
                        memory[at..at + 8].copy_from_slice(&new.to_le_bytes());
                    }
                    WrOp::CompareSwap {
                        va, compare, swap, ..
                    } => {
                        let at = va as usize;
                        op.original = le(&memory[at..]);
                        if op.original == compare {
                            memory[at..at + 8].copy_from_slice(&swap.to_le_bytes());
                        }
                    }
                    WrOp::Read { va, .. } => {
                        op.snapshot = memory[va as usize..][..op.wr.length as usize].to_vec();
                    }
                    _ => {}
                }
            }
            ends[1 - i].left_to_post = needed;
        }
        let mut world = Self {
            now: 1_000,
            rng,
            cfg,
            ends,
            queue: BinaryHeap::new(),
            jobs: HashMap::new(),
            next_job: 0,
            atomics: HashMap::new(),
            steps: 0,
            last_event: 0,
        };
        for end in 0..2 {
            world.schedule(end, 0, Job::Post);
            world.schedule(end, 0, Job::PostReceive);
            world.pump(end);
        }
        world
    }

    fn schedule(&mut self, end: usize, after: Time, job: Job) {
        self.next_job += 1;
        self.jobs.insert(self.next_job, job);
        self.queue
            .push(Reverse((self.now + after, self.next_job, end)));
    }

    fn delay(&mut self) -> Time {
        10 + self.rng.below(self.cfg.delay + 1)
    }

    fn host(&mut self, end: usize) -> (&mut Box<Stream>, Host_<'_>) {
        let may_hold = !self.rng.percent(self.cfg.no_hold);
        let hides_count = self.cfg.hides_count;
        let e = &mut self.ends[end];
        (
            &mut e.stream,
            Host_ {
                posted: &mut e.posted,
                bound: &mut e.bound,
                next_bound: &mut e.next_bound,
                hides_count,
                may_hold,
            },
        )
    }

    fn run(&mut self) {
        while let Some(Reverse((time, job, end))) = self.queue.pop() {
            self.steps += 1;
            // An end whose peer is gone offers its answers for ever.
            if time > self.last_event + 20_000_000_000
                && self
                    .ends
                    .iter()
                    .all(|e| e.next_done as usize == e.ops.len())
            {
                break;
            }
            if self.steps > 3_000_000 {
                for e in &self.ends {
                    println!(
                        "done {} of {}: {:?}, blocks {:?}",
                        e.next_done,
                        e.to_post,
                        e.ops.get(e.next_done as usize).map(|op| op.wr),
                        [Direction::Request, Direction::Response].map(|d| e.stream.block(d)),
                    );
                }
                panic!("no end in sight");
            }
            self.now = time;
            let job = self.jobs.remove(&job).expect("a job");
            self.step(end, job);
            self.pump(end);
        }
    }

    /// A transmission of a packet by `end` and what becomes of it.
    fn transmit(&mut self, end: usize, packet: PacketRef, header: StreamHeader) {
        let payload = self.payload(end, packet, &header);
        assert_eq!(payload.len(), usize::from(packet.len));
        let flight = Flight { header, payload };
        let copies = 1 + u64::from(self.rng.percent(self.cfg.duplication));
        for _ in 0..copies {
            if !self.rng.percent(self.cfg.loss) {
                let delay = self.delay();
                self.schedule(1 - end, delay, Job::Arrive(flight.clone()));
            }
        }
        let lost_ack = self.rng.percent(self.cfg.loss);
        let after = 2 * self.cfg.delay + 100;
        // Without an acknowledgement the path sends again, at most eight times: then the
        // packet is taken to have arrived, which `step` makes true.
        self.schedule(end, after, Job::Resend(packet, u32::from(lost_ack)));
    }

    fn payload(&mut self, end: usize, packet: PacketRef, header: &StreamHeader) -> Vec<u8> {
        match self.ends[end].stream.payload(packet) {
            Payload::None => Vec::new(),
            Payload::Send {
                stream,
                wr,
                offset,
                len,
            } => {
                assert_eq!(stream, StreamId(end as u32));
                assert_eq!(offset, header.offset);
                let op = &self.ends[end].ops[wr as usize];
                assert!(op.completed.is_none(), "the source is the program's again");
                op.data[offset as usize..][..len as usize].to_vec()
            }
            Payload::Read {
                request,
                offset,
                len,
                ..
            } => {
                assert!(self.ends[end].pinned.contains(&request), "source released");
                assert_eq!((request, offset), (header.request, header.offset));
                let va = self.read_address(end, request) as usize + offset as usize;
                self.ends[end].memory[va..][..len as usize].to_vec()
            }
            Payload::Pad { .. } => panic!("a stream does not pad"),
        }
    }

    /// Address of the READ that is request `number` of the peer of `end`.
    fn read_address(&self, end: usize, number: u32) -> u64 {
        let op = self.ends[1 - end]
            .ops
            .iter()
            .filter(|op| op.is_request())
            .nth(number as usize)
            .expect("a request");
        match op.wr.op {
            WrOp::Read { va, .. } => va,
            _ => panic!("not a READ"),
        }
    }

    fn request_op(&mut self, requester: usize, number: u32) -> &mut Op {
        self.ends[requester]
            .ops
            .iter_mut()
            .filter(|op| op.is_request())
            .nth(number as usize)
            .expect("a request")
    }

    fn step(&mut self, end: usize, job: Job) {
        let now = self.now;
        match job {
            Job::Arrive(flight) => self.arrive(end, flight),
            Job::Released(packet) => self.ends[end].stream.released(now, packet),
            Job::Resend(packet, lost) => self.resend(end, packet, lost),
            Job::Block(block) => self.ends[end].stream.on_block(now, &block),
            Job::Copied(placement, bytes) => self.copied(end, placement, bytes),
            Job::Timer => {
                if self.ends[end].timer.is_some_and(|t| t <= now) {
                    self.ends[end].timer = None;
                    self.ends[end].stream.on_timeout(now);
                }
            }
            Job::Post => self.post(end),
            Job::PostReceive => self.post_receive(end),
            Job::Read(request, rkey) => {
                let result = match rkey {
                    666 => Err(Fault::Access),
                    _ => Ok(()),
                };
                self.check_earlier(end, request);
                if result.is_ok() {
                    assert!(self.ends[end].pinned.insert(request));
                    let op = self.request_op(1 - end, request);
                    assert!(!op.acted, "read twice");
                    op.acted = true;
                }
                self.ends[end].stream.read_ready(now, request, result);
            }
            Job::Atomic(request) => {
                let (va, opcode, operand, swap) = self.atomics[&(end, request)];
                self.check_earlier(end, request);
                let op = self.request_op(1 - end, request);
                assert!(!op.acted, "an atomic ran twice");
                let bad = op.fails;
                let result = if bad {
                    Err(Fault::Access)
                } else {
                    op.acted = true;
                    let at = va as usize;
                    let memory = &mut self.ends[end].memory;
                    let old = le(&memory[at..]);
                    let new = match opcode {
                        Opcode::FetchAdd => old.wrapping_add(operand),
                        _ if old == operand => swap,
                        _ => old,
                    };
                    memory[at..at + 8].copy_from_slice(&new.to_le_bytes());
                    Ok(old)
                };
                self.ends[end].stream.atomic_done(now, request, result);
            }
            Job::Invalidated(rkey) => {
                let rmsn = self.ends[end].next_received;
                let op = self.ends[1 - end]
                    .ops
                    .iter_mut()
                    .find(|op| op.rmsn == Some(rmsn))
                    .expect("a message");
                assert_eq!(op.wr.op, WrOp::SendInv { rkey });
                assert!(!op.acted, "invalidated twice");
                let result = if op.fails {
                    Err(Fault::Access)
                } else {
                    op.acted = true;
                    Ok(())
                };
                self.ends[end].stream.invalidated(now, result);
            }
            Job::LocalDone(wr) => {
                let e = &mut self.ends[end];
                assert_eq!(e.local_told.take(), Some(wr));
                let status = match e.ops[wr as usize].fails {
                    true => Status::MwBind,
                    false => Status::Success,
                };
                e.stream.local_done(now, wr, status);
            }
            Job::Query => {
                self.ends[end].query = None;
                for dir in [Direction::Request, Direction::Response] {
                    if self.ends[end].stream.quiet_since(dir).is_some() {
                        let block = self.ends[1 - end].stream.block(dir);
                        self.send_block(1 - end, block);
                    }
                }
            }
        }
    }

    fn send_block(&mut self, from: usize, block: StreamBlock) {
        if !self.rng.percent(self.cfg.loss) {
            let delay = self.delay();
            self.schedule(1 - from, delay, Job::Block(block));
        }
    }

    fn resend(&mut self, end: usize, packet: PacketRef, lost: u32) {
        // `lost` counts transmissions whose acknowledgement did not come; with loss the
        // packet itself may have been lost as well.
        let needed = lost != 0 || self.rng.percent(self.cfg.loss);
        if !needed {
            // Acknowledged, so it has arrived: make sure by a delivery of the same.
            let mut header = StreamHeader::default();
            if self.ends[end].stream.rebuild(packet, &mut header) {
                let payload = self.payload(end, packet, &header);
                let flight = Flight { header, payload };
                self.schedule(1 - end, 1, Job::Arrive(flight));
            }
            self.schedule(end, 2, Job::Released(packet));
            return;
        }
        let mut header = StreamHeader::default();
        if self.ends[end].stream.rebuild(packet, &mut header) {
            self.transmit(end, packet, header);
        } else {
            self.schedule(end, 2, Job::Released(packet));
        }
    }

    fn arrive(&mut self, end: usize, flight: Flight) {
        let now = self.now;
        let relaxed = self.cfg.relaxed;
        let (stream, mut host) = self.host(end);
        let len = flight.payload.len() as u32;
        match stream.receive(now, &flight.header, len, &mut host) {
            Ok(Receive::Done) => {}
            Ok(Receive::Place(placement)) => self.copy(end, placement, flight.payload),
            Ok(Receive::Hold(placement)) => {
                if relaxed {
                    self.copy(end, placement, flight.payload);
                } else {
                    let old = self.ends[end]
                        .held
                        .insert(placement.token.sseq, flight.payload);
                    assert!(old.is_none(), "held twice");
                }
            }
            Err(Drop::UnknownStream) => {
                let block = StreamBlock::not_ready(&flight.header);
                self.send_block(end, block);
            }
            Err(Drop::StreamDuplicate | Drop::Refused) => {}
            Err(Drop::StreamWindow) => {
                // So late a duplicate that it is older than the window.
                let dir = flight.header.opcode.direction();
                let done = self.ends[end].stream.block(dir).cumulative;
                assert!((flight.header.sseq.wrapping_sub(done) as i32) < 0);
            }
            Err(other) => panic!("{other:?}: {:?}", flight.header),
        }
    }

    /// Begins a copy; a part of its bytes is visible at once, but not the last eight.
    fn copy(&mut self, end: usize, p: Placement, bytes: Vec<u8>) {
        assert!(self.ends[end].in_copy.insert(kind(&p)), "copied twice");
        if let Target::Remote { va, rkey } = p.target {
            if rkey == 7 && bytes.len() > 8 {
                if p.last {
                    self.check_final(end, &p);
                }
                let part = self.rng.below(bytes.len() as u64 - 8) as usize;
                let at = (va + u64::from(p.offset)) as usize;
                self.ends[end].memory[at..at + part].copy_from_slice(&bytes[..part]);
            }
        }
        let time = self.rng.below(self.cfg.copy + 1);
        self.schedule(end, time, Job::Copied(p, bytes));
    }

    /// The final packet of a Write is about to be copied: everything of its stream ahead
    /// of it is in place.
    fn check_final(&self, end: usize, p: &Placement) {
        if self.cfg.relaxed {
            return;
        }
        for op in &self.ends[1 - end].ops {
            match op.msn {
                Some(msn) if msn < p.token.msn => {
                    assert!(
                        op.is_in_place(),
                        "message {msn} is not in place: {:?}",
                        op.wr
                    );
                }
                Some(msn) if msn == p.token.msn => {
                    assert_eq!(op.placed, p.offset, "a part of the message is missing");
                }
                _ => {}
            }
        }
    }

    /// Everything before a READ or atomic is in place.
    fn check_earlier(&self, end: usize, request: u32) {
        let mut requests = 0;
        for op in &self.ends[1 - end].ops {
            if op.is_request() {
                if requests == request {
                    return;
                }
                requests += 1;
            }
            assert!(op.is_in_place(), "{:?} is not in place", op.wr);
        }
    }

    fn copied(&mut self, end: usize, p: Placement, bytes: Vec<u8>) {
        let now = self.now;
        assert!(self.ends[end].in_copy.remove(&kind(&p)));
        if p.last {
            self.check_final(end, &p);
        }
        let mut result = Placed::Ok;
        match p.target {
            Target::Remote { va, rkey } => {
                let op = self.ends[1 - end]
                    .ops
                    .iter_mut()
                    .find(|op| op.msn == Some(p.token.msn))
                    .expect("a message");
                assert_eq!(p.total, op.wr.length);
                if rkey != 7 {
                    result = Placed::Fault(Fault::Access);
                } else {
                    assert_eq!(op.data[p.offset as usize..][..bytes.len()], bytes[..]);
                    op.placed += bytes.len() as u32;
                    let at = (va + u64::from(p.offset)) as usize;
                    self.ends[end].memory[at..at + bytes.len()].copy_from_slice(&bytes);
                }
            }
            Target::Receive { rmsn } => {
                let op = self.ends[1 - end]
                    .ops
                    .iter_mut()
                    .find(|op| op.rmsn == Some(rmsn))
                    .expect("a message");
                assert_eq!(op.msn, Some(p.token.msn));
                if op.fails && self.cfg.failure == Some(Failure::ReceiveFault) {
                    result = Placed::Fault(Fault::Access);
                } else {
                    op.placed += bytes.len() as u32;
                    let b = self.ends[end]
                        .bound
                        .get_mut(&rmsn)
                        .expect("the receive is bound and not complete");
                    b.data[p.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
                }
            }
            Target::Request { wr } => {
                let op = &mut self.ends[end].ops[wr as usize];
                assert!(op.completed.is_none(), "copied after completion");
                if op.fails && self.cfg.failure == Some(Failure::LocalTarget) {
                    result = Placed::Fault(Fault::Access);
                } else if let Some(value) = p.value {
                    op.value = value;
                    op.got += 8;
                } else {
                    op.result[p.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
                    op.got += bytes.len() as u32;
                }
                assert!(op.got <= op.wr.length, "copied twice");
            }
        }
        let (stream, mut host) = self.host(end);
        stream.placed(now, p.token, result, &mut host);
    }

    fn post(&mut self, end: usize) {
        let now = self.now;
        let burst = 1 + self.rng.below(20);
        for _ in 0..burst {
            let e = &mut self.ends[end];
            let Some(op) = e.ops.get(e.to_post) else {
                return;
            };
            match e.stream.post(now, op.wr) {
                Ok(wr) => {
                    assert_eq!(wr as usize, e.to_post);
                    e.to_post += 1;
                }
                Err(_) => {
                    e.queue_full = true;
                    return;
                }
            }
        }
        let again = 1 + self.rng.below(self.cfg.delay + 1000);
        self.schedule(end, again, Job::Post);
    }

    fn post_receive(&mut self, end: usize) {
        let now = self.now;
        let count = if self.cfg.scarce {
            self.rng.below(3) as usize
        } else {
            1000
        };
        for _ in 0..count {
            let e = &mut self.ends[end];
            if e.left_to_post == 0 {
                break;
            }
            e.left_to_post -= 1;
            // The receive for a message that is to be too long is a byte short.
            let n = e.next_bound + e.posted.len() as u32;
            let op = self.ends[1 - end]
                .ops
                .iter()
                .find(|op| op.rmsn == Some(n))
                .expect("a message");
            let room = match op.wr.op {
                WrOp::WriteImm { .. } => 0,
                _ if op.fails && self.cfg.failure == Some(Failure::TooLong) => {
                    u64::from(op.wr.length) - 1
                }
                _ => u64::from(op.wr.length) + self.rng.below(50),
            };
            self.ends[end].posted.push_back(room);
        }
        let e = &mut self.ends[end];
        let posted = (!self.cfg.hides_count).then_some(e.posted.len() as u32);
        e.stream.receives_changed(now, posted);
        if e.left_to_post != 0 {
            let again = 1 + self.rng.below(self.cfg.delay + 20_000);
            self.schedule(end, again, Job::PostReceive);
        }
    }

    /// Everything that a driver does after it has touched a stream.
    fn pump(&mut self, end: usize) {
        loop {
            let mut idle = true;
            while let Some(event) = self.ends[end].stream.poll_event() {
                idle = false;
                self.event(end, event);
            }
            let mut header = StreamHeader::default();
            loop {
                let now = self.now;
                let can = self.ends[end].stream.can_send(now);
                let packet = self.ends[end]
                    .stream
                    .next_packet(now, u32::MAX, &mut header);
                assert_eq!(can, packet.is_some());
                let Some(packet) = packet else { break };
                idle = false;
                self.ends[end].stream.sent(packet);
                self.check_transmission(end, &header);
                self.transmit(end, packet, header);
            }
            for (dir, dirty) in [Direction::Request, Direction::Response]
                .into_iter()
                .zip(self.ends[end].stream.take_dirty())
            {
                if dirty {
                    let block = self.ends[end].stream.block(dir);
                    self.send_block(end, block);
                }
            }
            if idle {
                break;
            }
        }
        if let Some(t) = self.ends[end].stream.poll_timeout() {
            if self.ends[end].timer.is_none_or(|old| t < old) {
                self.ends[end].timer = Some(t);
                let after = t.saturating_sub(self.now);
                self.schedule(end, after, Job::Timer);
            }
        }
        if self.ends[end].stream.wants_query() && self.ends[end].query.is_none() {
            self.ends[end].query = Some(self.now);
            let after = 4 * self.cfg.delay + 1_000;
            self.schedule(end, after, Job::Query);
        }
    }

    /// First transmissions keep fences, limits and the order of local work.
    fn check_transmission(&mut self, end: usize, h: &StreamHeader) {
        if h.opcode.direction() == Direction::Response {
            return;
        }
        let e = &mut self.ends[end];
        let at = e
            .ops
            .iter()
            .position(|op| op.msn == Some(h.msn))
            .expect("a message");
        let (earlier, rest) = e.ops.split_at_mut(at);
        let op = &mut rest[0];
        assert_eq!(h.total, op.wr.length);
        if op.takes_receive() {
            assert_eq!(Some(h.rmsn), op.rmsn);
        }
        if op.begun {
            return;
        }
        op.begun = true;
        let answered = |op: &&Op| op.got == op.wr.length && op.acted;
        let unanswered = earlier
            .iter()
            .filter(|op| op.is_request() && !answered(op))
            .count() as u32;
        if op.wr.fence {
            assert_eq!(unanswered, 0, "fence");
        }
        if op.is_request() {
            assert!(unanswered < e.stream.attr().max_rd_atomic, "max_rd_atomic");
        }
        for op in earlier {
            assert!(op.begun || op.wr.op == WrOp::Local);
            if op.wr.op == WrOp::Local {
                assert!(op.acted, "local work is waited for");
            }
        }
    }

    fn event(&mut self, end: usize, event: Event) {
        self.last_event = self.now;
        match event {
            Event::SendDone { wr, status, .. } => self.send_done(end, wr, status),
            Event::RecvDone {
                rmsn,
                opcode,
                length,
                imm,
                solicited,
                status,
                ..
            } => {
                let e = &mut self.ends[end];
                assert_eq!(rmsn, e.next_received, "receive order");
                e.next_received += 1;
                let copying = e.in_copy.iter().any(|c| c.0 == Kind::Receive);
                assert!(!copying || status == Status::Success);
                let b = e.bound.remove(&rmsn).expect("bound");
                let at = self.ends[1 - end]
                    .ops
                    .iter()
                    .position(|op| op.rmsn == Some(rmsn))
                    .expect("a message");
                for op in &self.ends[1 - end].ops[..at] {
                    assert!(op.is_in_place(), "{:?} is not in place", op.wr);
                }
                let op = &self.ends[1 - end].ops[at];
                assert_eq!(length, op.wr.length);
                if status != Status::Success {
                    assert!(op.fails);
                    let wanted = match self.cfg.failure {
                        Some(Failure::TooLong) => Status::LocalLength,
                        Some(Failure::ReceiveFault) => Status::LocalProtection,
                        other => panic!("{other:?}"),
                    };
                    assert_eq!(status, wanted);
                    return;
                }
                assert!(op.is_in_place());
                assert_eq!(solicited, op.wr.solicited);
                let wanted = match op.wr.op {
                    WrOp::Send => (Opcode::Send, 0),
                    WrOp::SendImm { imm } => (Opcode::SendImm, imm),
                    WrOp::SendInv { rkey } => (Opcode::SendInv, rkey),
                    WrOp::WriteImm { imm, .. } => (Opcode::WriteImm, imm),
                    other => panic!("{other:?}"),
                };
                assert_eq!((opcode, imm), wanted);
                if opcode != Opcode::WriteImm {
                    assert!(u64::from(length) <= b.room);
                    assert_eq!(b.data[..length as usize], op.data[..]);
                }
            }
            Event::Invalidate { rkey, .. } => {
                let after = self.rng.below(self.cfg.copy + 1);
                self.schedule(end, after, Job::Invalidated(rkey));
            }
            Event::Read { request, rkey, .. } => {
                let after = self.rng.below(self.cfg.copy + 1);
                self.schedule(end, after, Job::Read(request, rkey));
            }
            Event::ReadReleased { request, .. } => {
                assert!(self.ends[end].pinned.remove(&request), "released twice");
            }
            Event::Atomic {
                request,
                opcode,
                va,
                compare_add,
                swap,
                ..
            } => {
                let old = self
                    .atomics
                    .insert((end, request), (va, opcode, compare_add, swap));
                assert!(old.is_none(), "an atomic was asked for twice");
                let after = self.rng.below(self.cfg.copy + 1);
                self.schedule(end, after, Job::Atomic(request));
            }
            Event::Local { wr, .. } => {
                let e = &mut self.ends[end];
                assert_eq!(wr, e.next_done, "all earlier ones are complete");
                assert!(e.local_told.is_none());
                e.local_told = Some(wr);
                e.ops[wr as usize].acted = true;
                let after = self.rng.below(self.cfg.copy + 1);
                self.schedule(end, after, Job::LocalDone(wr));
            }
            Event::Release(p) => {
                if let Some(bytes) = self.ends[end].held.remove(&p.token.sseq) {
                    self.copy(end, p, bytes);
                } else {
                    assert!(self.cfg.relaxed);
                }
            }
            Event::Discard(token) => {
                let held = self.ends[end].held.remove(&token.sseq);
                assert!(held.is_some() || self.cfg.relaxed);
            }
            Event::StreamError { fault, .. } => {
                let e = &mut self.ends[end];
                e.errors.push(fault);
                // Its receives are flushed: nothing may be copied to them any more.
                assert!(e.in_copy.iter().all(|c| c.0 == Kind::Memory));
                e.bound.clear();
            }
            Event::Established { .. } => self.ends[end].established += 1,
            Event::Drained { .. } => panic!("nobody drains"),
            other => panic!("{other:?}"),
        }
    }

    fn send_done(&mut self, end: usize, wr: u32, status: Status) {
        if core::mem::take(&mut self.ends[end].queue_full) {
            self.schedule(end, 1, Job::Post);
        }
        let posted = self.ends[end].to_post;
        let e = &mut self.ends[end];
        assert_eq!(wr, e.next_done, "completion order");
        assert!((wr as usize) < posted);
        e.next_done += 1;
        let op = &mut e.ops[wr as usize];
        assert_eq!(op.completed, None);
        op.completed = Some(status);
        if status != Status::Success {
            assert!(!e.in_copy.iter().any(|c| c.0 == Kind::Answer));
        }
        match status {
            Status::Success => {
                assert_eq!(e.flushes, 0);
                assert!(!op.fails, "{:?} was to fail", op.wr);
            }
            Status::Flushed => {
                e.flushes += 1;
                return;
            }
            error => {
                e.flushes += 1;
                let wanted = match (op.fails, self.cfg.failure) {
                    (true, Some(Failure::BadKey | Failure::BadRead | Failure::BadAtomic)) => {
                        Status::RemoteAccess
                    }
                    (true, Some(Failure::TooLong)) => Status::RemoteInvalidRequest,
                    (true, Some(Failure::BadLocal)) => Status::MwBind,
                    (true, Some(Failure::LocalTarget)) => Status::LocalProtection,
                    (true, Some(Failure::ReceiveFault)) => Status::RemoteOperation,
                    (true, Some(Failure::Invalidation)) => Status::RemoteAccess,
                    // The peer is gone with its own error.
                    _ => Status::RetryExceeded,
                };
                assert_eq!(error, wanted);
                return;
            }
        }
        assert!(
            op.is_in_place(),
            "completed and not in place: {:?}, {} bytes are",
            op.wr,
            op.placed
        );
        if op.is_request() {
            assert_eq!(op.got, op.wr.length);
        }
        if matches!(op.wr.op, WrOp::FetchAdd { .. } | WrOp::CompareSwap { .. }) {
            assert_eq!(op.value, op.original);
        }
        if let WrOp::Read { va, .. } = op.wr.op {
            // What the READ saw: the memory as the earlier WRs left it, or what one that
            // came later and did not wait for it has written since.
            let result = op.result.clone();
            let snapshot = op.snapshot.clone();
            for (i, (got, wanted)) in result.iter().zip(&snapshot).enumerate() {
                let at = va + i as u64;
                let later = e.ops[wr as usize + 1..posted]
                    .iter()
                    .any(|op| match op.wr.op {
                        WrOp::Write { va, .. } | WrOp::WriteImm { va, .. } => {
                            at >= va
                                && at < va + u64::from(op.wr.length)
                                && op.data[(at - va) as usize] == *got
                        }
                        _ => false,
                    });
                assert!(
                    got == wanted || later || self.cfg.relaxed,
                    "byte {i} of a READ is of no time"
                );
            }
        }
    }

    fn finish(&mut self) {
        let failed = self.cfg.failure.is_some();
        for end in 0..2 {
            let e = &self.ends[end];
            assert!(e.in_copy.is_empty());
            // What is ahead of a held packet does not come from a requester in ERR.
            let alone =
                self.ends[1 - end].stream.state() == State::Err && e.stream.state() != State::Err;
            assert!(alone || e.held.is_empty(), "held for ever");
            assert_eq!(e.established, 0);
            assert_eq!(e.to_post, e.ops.len(), "everything is posted in the end");
            assert_eq!(
                e.next_done as usize,
                e.ops.len(),
                "every WR completes: {:?}",
                e.ops[e.next_done as usize].wr
            );
            if failed {
                continue;
            }
            assert!(e.errors.is_empty());
            assert_eq!(e.stream.quiet_since(Direction::Request), None);
            // The memory is what doing everything in order leaves.
            let mut memory = vec![0u8; MEMORY];
            for op in &self.ends[1 - end].ops {
                assert!(op.is_in_place());
                match op.wr.op {
                    WrOp::Write { va, .. } | WrOp::WriteImm { va, .. } => {
                        memory[va as usize..][..op.data.len()].copy_from_slice(&op.data);
                    }
                    WrOp::FetchAdd { va, add, .. } => {
                        let new = op.original.wrapping_add(add);
                        memory[va as usize..][..8].copy_from_slice(&new.to_le_bytes());
                    }
                    WrOp::CompareSwap {
                        va, compare, swap, ..
                    } if op.original == compare => {
                        memory[va as usize..][..8].copy_from_slice(&swap.to_le_bytes());
                    }
                    _ => {}
                }
            }
            if !self.cfg.relaxed {
                assert_eq!(e.memory, memory);
            }
            assert_eq!(
                e.next_received as usize,
                self.ends[1 - end]
                    .ops
                    .iter()
                    .filter(|op| op.takes_receive())
                    .count()
            );
        }
        if self.cfg.failure.is_some() {
            let at = self.ends[0].ops.iter().position(|op| op.fails);
            let at = at.expect("one was to fail");
            let status = |i: usize| self.ends[0].ops[i].completed;
            if status(at) != Some(Status::Flushed) && status(at) != Some(Status::RetryExceeded) {
                for i in 0..at {
                    assert_eq!(status(i), Some(Status::Success));
                }
            }
            for end in 0..2 {
                let own = [Some(Failure::BadLocal), Some(Failure::LocalTarget)];
                if end == 1 && own.contains(&self.cfg.failure) {
                    // Only hears of it when it wants something itself.
                    continue;
                }
                assert_eq!(self.ends[end].stream.state(), State::Err, "end {end}");
                assert_eq!(self.ends[end].errors.len(), 1);
                assert!(self.ends[end].pinned.is_empty(), "sources are released");
            }
        }
    }
}

#[test]
fn random_lists() {
    for seed in seeds(400) {
        println!("seed {seed}");
        let mut world = World::new(seed);
        println!("{:?}", world.cfg);
        world.run();
        world.finish();
    }
}
