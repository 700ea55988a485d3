// SPDX-License-Identifier: GPL-2.0
//! mroce-local: unprivileged processes do with a device what no program should, while another
//! process moves data over it of which every byte is checked. They may end in any way; the
//! kernel, and the other process, must not notice.

#![forbid(unsafe_code)]

use selftests::args::Args;
use selftests::endpoint::{choose_gid, Device, ALL_ACCESS, RING_LENGTHS, RING_PAGES};
use selftests::ktap::{note, Ktap, Outcome};
use selftests::rng::Rng;
use selftests::sys::{self, Memory};
use selftests::verbs::{self, Connect, Context, Mr, Pd, Qp, QpInit, SendWr, Sge};
use selftests::{check, fail};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

const HELP: &str = "\
usage: mroce-local [--dev NAME] [--gid INDEX] [--seconds N] [--seed N] [CASE...]

  --seconds N   how long each case goes on (default 5)

CASE is a name or the beginning of one. Results are KTAP. Root, which gives the hostile
processes to user 65534 and makes the device accessible to all.
";

/// Hostile processes of a case at a time.
const PROCESSES: usize = 2;

/// Mappings that a process keeps of objects that are gone.
const KEPT: usize = 200;

/// Beyond the time of a case: what a busy machine may take.
const PATIENCE: Duration = Duration::from_secs(20);

struct Rig {
    context: Arc<Context>,
    pd: Arc<Pd>,
    gid: (u32, [u8; 16]),
    mtu: u32,
    /// What a hostile process knows of the other one.
    victim: Victim,
}

/// What belongs to the process whose data is checked: its QP, its keys, and an address in its memory
/// where nothing is ever written.
#[derive(Clone, Copy, Default)]
struct Victim {
    qpn: u32,
    lkey: u32,
    rkey: u32,
    addr: u64,
}

impl Rig {
    fn new(device: &Device) -> io::Result<Self> {
        let context = Context::open(device.name.as_deref())?;
        Ok(Rig {
            pd: context.alloc_pd()?,
            gid: choose_gid(&context, device)?,
            mtu: context.query_port(1)?.active_mtu,
            victim: Victim::default(),
            context,
        })
    }

    fn pair(&self, depth: u32) -> io::Result<(Arc<Qp>, Arc<Qp>)> {
        let make = || -> io::Result<Arc<Qp>> {
            let cq = self.context.create_cq(depth * 4, None)?;
            self.pd.create_qp(&QpInit::rc(&cq, &cq, depth, 2, 64))
        };
        let (a, b) = (make()?, make()?);
        self.connect(&a, b.number)?;
        self.connect(&b, a.number)?;
        Ok((a, b))
    }

    /// Connects a QP with the one of this device that has the number `to`.
    fn connect(&self, qp: &Qp, to: u32) -> io::Result<()> {
        let connect = Connect::to_own(to, self.gid, self.mtu);
        qp.init(ALL_ACCESS)?;
        qp.to_rtr(&connect)?;
        qp.to_rts(&connect)
    }
}

/// Bytes of the checked process's memory; nobody writes from UNTOUCHED on.
const MEMORY: usize = 1 << 18;
const UNTOUCHED: usize = 3 << 16;

/// A Write and a READ back, checked, until `stop`; the number of rounds.
fn verified(mr: &Mr, a: &Qp, stop: &AtomicBool) -> Outcome<u64> {
    let text = |e: io::Error| e.to_string();
    let memory = &mr.memory;
    let mut round = 0;
    while !stop.load(Ordering::Relaxed) {
        let len = 1 + (round as usize * 7919) % 60_000;
        memory.fill(0, len, round);
        let wr = |wr_id, opcode, at| SendWr {
            wr_id,
            opcode,
            sges: vec![mr.sge(at, len)],
            flags: verbs::IBV_SEND_SIGNALED,
            remote_addr: mr.addr(1 << 17),
            rkey: mr.rkey,
            ..SendWr::default()
        };
        a.post_send(&[wr(0, verbs::IBV_WR_RDMA_WRITE, 0), wr(1, verbs::IBV_WR_RDMA_READ, 1 << 16)])
            .map_err(|e| e.to_string())?;
        for id in 0..2 {
            match a.send_cq.poll_one(Duration::from_secs(30)).map_err(text)? {
                Some(wc) if wc.status == verbs::IBV_WC_SUCCESS && wc.wr_id == id => {}
                Some(wc) => {
                    fail!("round {round}: request {} ended with {}", wc.wr_id, verbs::status_name(wc.status))
                }
                None => fail!("round {round}: request {id} does not end"),
            }
        }
        memory.verify(1 << 16, len, round).map_err(|m| format!("round {round}: {m}"))?;
        round += 1;
    }
    let untouched = memory.copy(UNTOUCHED, MEMORY - UNTOUCHED);
    check!(untouched.iter().all(|b| *b == 0), "somebody has written where nobody may");
    Ok(round)
}

/// All that the device lets this process map a second time, whatever it is.
fn mappings(fd: RawFd) -> Vec<Memory> {
    let mut all = Vec::new();
    for page in 0..RING_PAGES {
        for pages in 1..64 {
            if let Ok(m) = sys::map_shared(fd, page, pages << 12) {
                all.push(m);
                break;
            }
        }
    }
    all
}

/// case24: indices, lengths, keys and addresses of the rings change while the kernel reads them.
fn scribble(rig: &Rig, rng: &mut Rng, end: Instant) -> io::Result<()> {
    let mr = rig.pd.reg(&Arc::new(Memory::new(1 << 16)?), ALL_ACCESS)?;
    let (a, b) = rig.pair(16)?;
    let rings = mappings(rig.context.cmd_fd());
    if rings.is_empty() {
        return Err(io::Error::other("no ring could be mapped"));
    }
    let stop = AtomicBool::new(false);
    let mut own = Rng::new(rng.bits());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let ring = own.pick(&rings);
                let words = ring.len() as u64 / 8;
                let at = if own.one_in(2) { own.below(40) } else { own.below(words) };
                let value = match own.below(4) {
                    0 => own.bits(),
                    1 => own.below(70_000),
                    2 => ring.word(at as usize * 8).wrapping_add(1),
                    _ => u64::from(own.bits() as u32),
                };
                ring.set_word(at as usize * 8, value);
            }
        });
        while Instant::now() < end {
            // By the kernel's doorbell alone: what the library would refuse is in the ring.
            let _ = write_command(rig.context.cmd_fd(), 29, &[a.number, 0, 0, 0, 96], rng);
            let wr = SendWr {
                opcode: verbs::IBV_WR_RDMA_WRITE,
                sges: vec![mr.sge(0, 100)],
                remote_addr: mr.addr(0),
                rkey: mr.rkey,
                ..SendWr::default()
            };
            let _ = a.post_send(&[wr]);
            let _ = b.post_recv(1, &[mr.sge(0, 100)]);
        }
        stop.store(true, Ordering::Relaxed);
    });
    Ok(())
}

/// A command of the write interface: header, response address, then `words`.
fn write_command(fd: RawFd, command: u32, words: &[u32], rng: &mut Rng) -> io::Result<()> {
    let mut bytes = Vec::new();
    let in_words = (words.len() + 4) as u16;
    bytes.extend_from_slice(&command.to_le_bytes());
    bytes.extend_from_slice(&in_words.to_le_bytes());
    bytes.extend_from_slice(&(rng.below(20) as u16).to_le_bytes());
    bytes.extend_from_slice(&0u64.to_le_bytes());
    for w in words {
        bytes.extend_from_slice(&w.to_le_bytes());
    }
    sys::write(fd, &bytes).map(drop)
}

/// Any pages, lengths of the rings and others, again and again, while objects come and go. Rings
/// have to be among what was mapped.
fn mmap(rig: &Rig, rng: &mut Rng, end: Instant) -> io::Result<()> {
    let fd = rig.context.cmd_fd();
    let (mut hits, mut kept) = (0u64, Vec::new());
    while hits == 0 || Instant::now() < end {
        if Instant::now() > end + PATIENCE {
            return Err(io::Error::other("no ring could be mapped"));
        }
        let pair = rig.pair(16)?;
        for _ in 0..200 {
            let page = match rng.below(4) {
                0 => rng.bits() >> 12,
                1 => rng.below(1 << 32),
                _ => rng.below(RING_PAGES),
            };
            let longest = if rng.one_in(4) { 40 } else { RING_LENGTHS };
            let pages = 1 + rng.below(longest) as usize;
            hits += u64::from(sys::probe_mmap(fd, page, pages));
            if kept.len() < KEPT && rng.one_in(4) {
                // Stays mapped until the process ends, longer than the object.
                kept.extend(sys::map_shared(fd, page, pages << 12));
            }
        }
        drop(pair);
    }
    // What is left of objects that are gone can still be written to.
    for (i, ring) in kept.iter().enumerate() {
        ring.set_word(0, i as u64);
    }
    Ok(())
}

/// Commands with random attributes, handles and lengths, by ioctl and by write.
fn commands(rig: &Rig, rng: &mut Rng, end: Instant) -> io::Result<()> {
    let fd = rig.context.cmd_fd();
    let target = Memory::new(1 << 16)?;
    let _objects = (rig.pair(16)?, rig.pd.create_srq(16, 1)?);
    while Instant::now() < end {
        if rng.one_in(3) {
            let (mut block, pointers) = extension(rng);
            let _ = sys::ioctl(fd, 0xc018_1b01, &mut block, &pointers, &target);
            continue;
        }
        let attrs = rng.below(8) as usize;
        let mut block = vec![0u64; 3 + attrs * 2];
        let length = match rng.below(8) {
            0 => rng.below(0x10000),
            _ => block.len() as u64 * 8,
        };
        let object = if rng.one_in(8) { rng.below(0x10000) } else { rng.below(20) };
        let method = if rng.one_in(8) { rng.below(0x10000) } else { rng.below(12) };
        block[0] = length | object << 16 | method << 32 | (attrs as u64) << 48;
        block[2] = 0x4d52_4345;
        let mut pointers = Vec::new();
        for i in 0..attrs {
            let id = match rng.below(4) {
                0 => 0x1000 + rng.below(2),
                _ => rng.below(24),
            };
            let len = *rng.clone().pick(&[0, 4, 8, 16, 24, 64, rng.below(0x10000)]);
            let flags = rng.below(4);
            block[3 + i * 2] = id | len << 16 | flags << 32 | rng.below(4) << 48;
            if rng.one_in(3) {
                block[4 + i * 2] = rng.below(64);
            } else if rng.one_in(8) {
                block[4 + i * 2] = rng.bits();
            } else {
                block[4 + i * 2] = rng.bits();
                pointers.push(4 + i * 2);
            }
        }
        let _ = sys::ioctl(fd, 0xc018_1b01, &mut block, &pointers, &target);
        let words: Vec<u32> = (0..rng.below(40))
            .map(|_| match rng.below(3) {
                0 => rng.bits() as u32,
                1 => rng.below(16) as u32,
                _ => target.addr() as u32,
            })
            .collect();
        let extended = if rng.one_in(3) { 0x8000_0000 } else { 0 };
        let _ = write_command(fd, rng.below(64) as u32 | extended, &words, rng);
    }
    Ok(())
}

/// A call of one of the driver's own methods (uapi/rdma/metaroce-abi.h): right but for a few attributes.
/// The block, and which of its words are pointers.
fn extension(rng: &mut Rng) -> (Vec<u64>, Vec<usize>) {
    const LENGTHS: [u64; 12] = [0, 1, 4, 8, 12, 16, 24, 104, 112, 208, 512, 0xffff];
    let method = rng.below(4);
    // Query, modify, transitions, and none.
    let known = [4, 2, 5, 6][method as usize];
    let (mut block, mut pointers) = (vec![0, 0, 0x4d52_4345], Vec::new());
    for id in 0..known {
        if rng.one_in(10) {
            continue;
        }
        let (len, value) = match id {
            // A handle; that of an event file, a region and others among them.
            0 => (0, rng.below(8)),
            // What is as long as a word is not pointed to.
            _ if rng.one_in(2) => (*rng.pick(&[4, 8]), *rng.clone().pick(&[0, 1, 40, 112, 512, rng.bits()])),
            _ => {
                pointers.push(block.len() + 1);
                (*rng.pick(&LENGTHS), rng.bits())
            }
        };
        let flags = if rng.one_in(8) { rng.below(4) } else { 1 };
        let reserved = if rng.one_in(30) { rng.below(4) } else { 0 };
        block.extend([(0x1000 + id) | len << 16 | flags << 32 | reserved << 48, value]);
    }
    let attrs = (block.len() as u64 - 3) / 2;
    block[0] = block.len() as u64 * 8 | 0x1000 << 16 | (0x1000 + method) << 32 | attrs << 48;
    (block, pointers)
}

/// Posts so many Writes, of which some may be refused.
fn post(qp: &Qp, mr: &Mr, n: u64) {
    for i in 0..n {
        let wr = SendWr {
            wr_id: i,
            opcode: verbs::IBV_WR_RDMA_WRITE,
            sges: vec![mr.sge(0, 100_000)],
            flags: verbs::IBV_SEND_SIGNALED,
            remote_addr: mr.addr(1 << 17),
            rkey: mr.rkey,
            ..SendWr::default()
        };
        let _ = qp.post_send(&[wr]);
    }
}

/// QPs, regions and CQs go while others post to them.
fn destroy(rig: &Rig, rng: &mut Rng, end: Instant) -> io::Result<()> {
    while Instant::now() < end {
        let mr = rig.pd.reg(&Arc::new(Memory::new(1 << 18)?), ALL_ACCESS)?;
        let (a, b) = rig.pair(16)?;
        std::thread::scope(|scope| {
            scope.spawn(|| post(&a, &mr, 40));
            for _ in 0..rng.below(30) {
                std::thread::yield_now();
            }
            // The receiving end goes in the middle.
            drop(b);
            let _ = a.set_state(verbs::IBV_QPS_ERR);
        });
        // The region goes before the QP that has work for it.
        drop(mr);
    }
    Ok(())
}

/// Ends in the middle, without a word, and others fork and exec meanwhile.
fn exit(rig: &Rig, rng: &mut Rng, end: Instant) -> io::Result<()> {
    let mr = rig.pd.reg(&Arc::new(Memory::new(1 << 18)?), ALL_ACCESS)?;
    let (a, _b) = rig.pair(64)?;
    for _ in 0..60 {
        post(&a, &mr, 1);
        if rng.one_in(20) && Instant::now() < end {
            let _ = Command::new("true").status();
        }
        if rng.one_in(40) {
            break;
        }
    }
    std::process::abort()
}

/// Registers as much as it may lock, and more.
fn memlock(rig: &Rig, _: &mut Rng, end: Instant) -> io::Result<()> {
    sys::set_memlock(1 << 20)?;
    while Instant::now() < end {
        let small = rig.pd.reg(&Arc::new(Memory::new(256 << 10)?), ALL_ACCESS)?;
        let large = rig.pd.reg(&Arc::new(Memory::new(4 << 20)?), ALL_ACCESS);
        match large {
            Ok(_) => return Err(io::Error::other("more memory was locked than the limit allows")),
            Err(e) if e.raw_os_error() == Some(12) => {}
            Err(e) => return Err(e),
        }
        drop(small);
    }
    Ok(())
}

/// Forks with requests under way: the copies post to the same rings, change the state of what their
/// parent uses, write to the rings, or become a program that has the device open and does not know
/// it; some outlive their parent.
fn fork(rig: &Rig, rng: &mut Rng, end: Instant) -> io::Result<()> {
    let fd = rig.context.cmd_fd();
    sys::keep_across_exec(fd)?;
    while Instant::now() < end {
        let mr = rig.pd.reg(&Arc::new(Memory::new(1 << 18)?), ALL_ACCESS)?;
        let (a, b) = rig.pair(64)?;
        let mut children = Vec::new();
        for _ in 0..3 {
            post(&a, &mr, 10);
            let mut own = Rng::new(rng.bits());
            children.push(sys::fork(|| {
                post(&a, &mr, 20);
                match own.below(5) {
                    0 => drop(Command::new("sleep").arg("0.2").exec()),
                    1 => drop(a.set_state(verbs::IBV_QPS_ERR).and(b.set_state(verbs::IBV_QPS_RESET))),
                    2 => mappings(fd).iter().for_each(|ring| ring.set_word(0, own.bits())),
                    3 => drop(Rig::pair(rig, 16)),
                    _ => {}
                }
            })?);
        }
        if rng.one_in(8) {
            std::process::abort();
        }
        post(&a, &mr, 10);
        for child in children {
            child.wait()?;
        }
    }
    Ok(())
}

/// Uses what belongs to the other process: its keys, here and from afar, and its QP as a peer.
fn mixed(rig: &Rig, rng: &mut Rng, end: Instant) -> io::Result<()> {
    let victim = rig.victim;
    let mr = rig.pd.reg(&Arc::new(Memory::new(1 << 16)?), ALL_ACCESS)?;
    while Instant::now() < end {
        let (a, b) = rig.pair(4)?;
        let wr = |sge: Sge, addr, rkey| SendWr {
            opcode: verbs::IBV_WR_RDMA_WRITE,
            sges: vec![sge],
            flags: verbs::IBV_SEND_SIGNALED,
            remote_addr: addr,
            rkey,
            ..SendWr::default()
        };
        let own = mr.sge(0, 1000);
        let theirs = Sge::raw(victim.addr, 1000, victim.lkey);
        let (request, due) = match rng.below(4) {
            0 => (wr(own, victim.addr, victim.rkey), verbs::IBV_WC_REM_ACCESS_ERR),
            1 => (wr(theirs, mr.addr(0), mr.rkey), verbs::IBV_WC_LOC_PROT_ERR),
            2 => {
                let read = SendWr { opcode: verbs::IBV_WR_RDMA_READ, ..wr(theirs, mr.addr(0), mr.rkey) };
                (read, verbs::IBV_WC_LOC_PROT_ERR)
            }
            _ => {
                a.set_state(verbs::IBV_QPS_RESET)?;
                rig.connect(&a, victim.qpn)?;
                (wr(own, victim.addr, victim.rkey), verbs::IBV_WC_RETRY_EXC_ERR)
            }
        };
        a.post_send(&[request]).map_err(|e| e.error)?;
        match a.send_cq.poll_one(PATIENCE)? {
            Some(wc) if wc.status == due => {}
            Some(wc) => {
                let (is, due) = (verbs::status_name(wc.status), verbs::status_name(due));
                return Err(io::Error::other(format!("{is} where {due} is due")));
            }
            None => return Err(io::Error::other("a request with the keys of others does not end")),
        }
        drop(b);
    }
    Ok(())
}

type Deed = fn(&Rig, &mut Rng, Instant) -> io::Result<()>;

/// Name, what the hostile process does, whether it has to come to a good end.
const CASES: &[(&str, Deed, bool)] = &[
    ("case24_rings_change_under_the_kernel", scribble, false),
    ("local_mmap_anything", mmap, true),
    ("local_random_commands", commands, false),
    ("local_destroy_against_post", destroy, true),
    ("local_exit_in_the_middle", exit, false),
    ("local_fork_and_exec", fork, false),
    ("local_objects_of_two_processes", mixed, true),
    ("local_memlock", memlock, true),
];

/// What the hostile process is.
fn child(mut args: Args) -> i32 {
    let device = Device::from_args(&mut args);
    let name: String = args.text("--child").unwrap_or_default();
    let seed = args.value("--seed").unwrap_or(1);
    let seconds = args.value("--seconds").unwrap_or(5);
    let known: Vec<u64> =
        args.text("--victim").unwrap_or_default().split(',').filter_map(|word| word.parse().ok()).collect();
    let victim = match *known.as_slice() {
        [qpn, lkey, rkey, addr] => Victim { qpn: qpn as u32, lkey: lkey as u32, rkey: rkey as u32, addr },
        _ => Victim::default(),
    };
    let Some((_, deed, _)) = CASES.iter().find(|c| c.0 == name) else { return 2 };
    let result = Rig::new(&device).and_then(|rig| {
        deed(&Rig { victim, ..rig }, &mut Rng::new(seed), Instant::now() + Duration::from_secs(seconds))
    });
    match result {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("# hostile process: {e}");
            1
        }
    }
}

struct Options {
    device: Device,
    seconds: u64,
    seed: u64,
}

/// The name of this thread.
const COMM: &str = "/proc/thread-self/comm";

fn start(options: &Options, name: &str, seed: u64, victim: Victim) -> Outcome<Child> {
    let me = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new(me);
    command.args(["--child", name, "--seed", &seed.to_string(), "--seconds", &options.seconds.to_string()]);
    let Victim { qpn, lkey, rkey, addr } = victim;
    command.args(["--victim", &format!("{qpn},{lkey},{rkey},{addr}")]);
    if let Some(device) = &options.device.name {
        command.args(["--dev", device]);
    }
    // What the kernel makes for the process is told by this name from what it causes itself: one that asks
    // for a context twice is lost (see qemu-test/leaks).
    let _ = std::fs::write(COMM, "faults-parent");
    let child = command.uid(65534).gid(65534).spawn();
    let _ = std::fs::write(COMM, "mroce-local");
    child.map_err(|e| format!("starting a process: {e}").into())
}

fn run(options: &Options, name: &str, must_end_well: bool) -> Outcome {
    let text = |e: io::Error| e.to_string();
    let stop = AtomicBool::new(false);
    let rig = Rig::new(&options.device).map_err(text)?;
    let mr = rig.pd.reg(&Arc::new(Memory::new(MEMORY).map_err(text)?), ALL_ACCESS).map_err(text)?;
    let (a, _b) = rig.pair(16).map_err(text)?;
    let victim = Victim { qpn: a.number, lkey: mr.lkey, rkey: mr.rkey, addr: mr.addr(UNTOUCHED) };
    let (mut started, mut ended_well, mut first) = (0u64, 0u64, None);
    let rounds = std::thread::scope(|scope| -> Outcome<u64> {
        let traffic = scope.spawn(|| verified(&mr, &a, &stop));
        let end = Instant::now() + Duration::from_secs(options.seconds);
        let result = (|| -> Outcome {
            while Instant::now() < end {
                let mut children = Vec::new();
                for _ in 0..PROCESSES {
                    started += 1;
                    children.push(start(options, name, options.seed.wrapping_add(started), victim)?);
                }
                for mut c in children {
                    let status = c.wait().map_err(text)?;
                    if status.success() {
                        ended_well += 1;
                    } else {
                        first.get_or_insert(status);
                    }
                }
            }
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        let rounds = traffic.join().unwrap_or_else(|_| Err("the traffic panicked".into()));
        result.and(rounds)
    })?;
    note(&format!(
        "{started} hostile processes, {ended_well} ended by themselves; {rounds} rounds of other traffic"
    ));
    check!(rounds > 0, "no traffic beside them");
    if must_end_well {
        check!(ended_well == started, "one ended with {first:?}");
    }
    // Whatever they had is gone with them.
    let left = || {
        let out = Command::new("rdma").args(["resource", "show", "ctx", "dev", &rig.context.name]).output();
        out.map_or(0, |o| String::from_utf8_lossy(&o.stdout).matches("pid").count())
    };
    check!(sys::busywait(Duration::from_secs(10), || left() <= 1), "{} contexts are left", left());
    Ok(())
}

fn main() {
    let mut args = Args::from_env();
    args.help_or_list(HELP, CASES.iter().map(|c| c.0));
    if std::env::args().any(|a| a == "--child") {
        std::process::exit(child(args));
    }
    let options = Options {
        device: Device::from_args(&mut args),
        seconds: args.value("--seconds").unwrap_or(5),
        seed: args.value("--seed").unwrap_or(u64::from(std::process::id())),
    };
    let words = args.positionals();
    args.finish();
    if let Ok(entries) = std::fs::read_dir("/dev/infiniband") {
        for e in entries.flatten() {
            let _ = Command::new("chmod").arg("0666").arg(e.path()).status();
        }
    }
    let wanted = |name: &str| words.is_empty() || words.iter().any(|w| name.starts_with(w.as_str()));
    let cases: Vec<_> = CASES.iter().filter(|c| wanted(c.0)).collect();
    let mut ktap = Ktap::new(cases.len());
    note(&format!("seed {}", options.seed));
    for (name, _, well) in cases {
        ktap.run(name, || run(&options, name, *well));
    }
    std::process::exit(ktap.finish());
}
