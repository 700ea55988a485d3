// SPDX-License-Identifier: GPL-2.0
//! One of the processes that share the QPs: it has both ends of its pairs of addresses.

#![forbid(unsafe_code)]

use crate::Plan;
use selftests::endpoint::ALL_ACCESS;
use selftests::sys::Memory;
use selftests::verbs::{self, Connect, Context, Cq, Mr, Pd, Qp, QpInit, SendWr};
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a message.
const LEN: usize = 64;

/// Messages on their way at a time.
const BATCH: usize = 256;

/// The process as the one that started it has it.
pub struct Part {
    child: Child,
    words: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Part {
    /// Starts process `index` of the plan.
    pub fn start(plan: &Plan, index: usize) -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--part", &index.to_string(), "--qps", &plan.qps.to_string()]);
        command.args([
            "--processes",
            &plan.processes.to_string(),
            "--wait",
            &plan.wait.as_secs().to_string(),
        ]);
        if let Some(name) = &plan.device.name {
            command.args(["--dev", name]);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (words, answers) = (child.stdin.take(), child.stdout.take());
        let (Some(words), Some(answers)) = (words, answers) else {
            return Err(io::Error::other("a pipe is missing"));
        };
        let mut part = Part { child, words, answers: BufReader::new(answers) };
        // Open, and about to be told.
        part.answer()?;
        Ok(part)
    }

    /// Tells it what to do.
    pub fn tell(&mut self, what: &str) -> io::Result<()> {
        writeln!(self.words, "{what}")
    }

    /// What it says when that is done.
    pub fn answer(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        match line.trim_end_matches('\n').split_once(' ') {
            Some(("ok", rest)) => Ok(rest.to_string()),
            Some(("error", why)) => Err(io::Error::other(why.to_string())),
            _ => Err(io::Error::other(format!("process {} is gone", self.child.id()))),
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // It ends at the latest when nobody can tell it anything.
        let _ = writeln!(self.words, "end");
        let _ = self.child.wait();
    }
}

/// One end of a QP pair.
struct End {
    qp: Arc<Qp>,
    gid: (u8, [u8; 16]),
}

/// What a process has.
struct Objects {
    plan: Plan,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    mr: Arc<Mr>,
    memory: Arc<Memory>,
    mtu: u32,
    /// QP pairs by pair of addresses.
    pairs: Vec<Vec<[End; 2]>>,
    /// QP pairs of the first pair of addresses that are connected already.
    early: bool,
}

impl Objects {
    /// QP pairs for each pair of addresses of process `index`.
    fn counts(plan: &Plan, gids: usize, index: usize) -> Vec<(usize, usize, usize)> {
        let pairs = Plan::pairs(gids);
        let (each, more) = (plan.qps / 2 / pairs, plan.qps / 2 % pairs);
        let all = (0..gids).flat_map(|a| (a + 1..gids).map(move |b| (a, b)));
        all.enumerate()
            .filter(|(i, _)| i % plan.processes == index)
            .map(|(i, (a, b))| (a, b, each + usize::from(i < more)))
            .collect()
    }

    fn make(plan: &Plan, context: &Arc<Context>, index: usize) -> io::Result<Self> {
        let gids = Plan::gids(context)?;
        let counts = Self::counts(plan, gids.len(), index);
        let qps = 2 * counts.iter().map(|c| c.2).sum::<usize>();
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(4 * BATCH as u32, None)?;
        // Each QP has a message to send and room for one to come.
        let memory = Arc::new(Memory::new(qps * 2 * LEN)?);
        let mr = pd.reg(&memory, ALL_ACCESS)?;
        let mut objects = Objects {
            plan: plan.clone(),
            mtu: context.query_port(1)?.active_mtu,
            pd,
            cq,
            mr,
            memory,
            pairs: Vec::new(),
            early: false,
        };
        let mut slot = 0;
        for (a, b, count) in counts {
            let mut pair = Vec::with_capacity(count);
            for _ in 0..count {
                pair.push([objects.end(gids[a], slot)?, objects.end(gids[b], slot + 1)?]);
                slot += 2;
            }
            objects.pairs.push(pair);
        }
        Ok(objects)
    }

    /// A QP with the smallest queues, and its receive.
    fn end(&self, gid: (u8, [u8; 16]), slot: usize) -> io::Result<End> {
        let qp = self.pd.create_qp(&QpInit::rc(&self.cq, &self.cq, 1, 1, 0))?;
        qp.init(ALL_ACCESS)?;
        qp.post_recv(slot as u64, &[self.mr.sge(Self::room(slot), LEN)])?;
        Ok(End { qp, gid })
    }

    /// Where the message of the QP in `slot` is, and where that which comes to it goes.
    fn message(slot: usize) -> usize {
        2 * slot * LEN
    }

    fn room(slot: usize) -> usize {
        Self::message(slot) + LEN
    }

    fn connect(&self, pair: &[End; 2]) -> io::Result<()> {
        let [a, b] = pair;
        for step in [Qp::to_rtr, Qp::to_rts] {
            for (from, to) in [(a, b), (b, a)] {
                step(
                    &from.qp,
                    &Connect {
                        qpn: to.qp.number,
                        gid: to.gid.1,
                        gid_index: from.gid.0,
                        rq_psn: to.qp.number,
                        sq_psn: from.qp.number,
                        mtu: self.mtu,
                        rd_atomic: 1,
                        dest_rd_atomic: 1,
                        timeout: 19,
                        retry_cnt: 7,
                        rnr_retry: 7,
                        min_rnr_timer: 1,
                        traffic_class: 0,
                    },
                )?;
            }
        }
        Ok(())
    }

    /// Connects the first QP pair of each pair of addresses, that of the first one once.
    fn connect_first(&mut self) -> io::Result<()> {
        let done = usize::from(self.early);
        self.pairs.iter().skip(done).filter_map(|p| p.first()).try_for_each(|p| self.connect(p))
    }

    fn connect_rest(&mut self) -> io::Result<()> {
        self.pairs.iter().flat_map(|p| p.iter().skip(1)).try_for_each(|p| self.connect(p))
    }

    /// A message from each QP to its peer.
    fn send(&mut self) -> io::Result<()> {
        let seed = |slot: usize| (slot as u64) << 32 | u64::from(std::process::id());
        let ends: Vec<&End> = self.pairs.iter().flatten().flatten().collect();
        for slot in 0..ends.len() {
            self.memory.fill(Self::message(slot), LEN, seed(slot));
        }
        for (batch, group) in ends.chunks(BATCH).enumerate() {
            let mut of = HashMap::new();
            for (i, end) in group.iter().enumerate() {
                let slot = batch * BATCH + i;
                of.insert(end.qp.number, slot);
                let wr = SendWr {
                    wr_id: slot as u64,
                    sges: vec![self.mr.sge(Self::message(slot), LEN)],
                    opcode: verbs::IBV_WR_SEND,
                    flags: verbs::IBV_SEND_SIGNALED,
                    ..SendWr::default()
                };
                end.qp.post_send(&[wr]).map_err(|e| io::Error::other(e.to_string()))?;
            }
            // Both ends of a QP pair are in the same group: each sends, and each gets a message.
            let (mut sent, mut got) = (0, 0);
            while sent < group.len() || got < group.len() {
                let Some(wc) = self.cq.poll_one(self.plan.wait)? else {
                    return Err(io::Error::other(format!("{sent} sent, {got} arrived, and no more")));
                };
                let slot = of.get(&wc.qp_num).copied();
                if wc.status != verbs::IBV_WC_SUCCESS || slot != Some(wc.wr_id as usize) {
                    let name = verbs::status_name(wc.status);
                    return Err(io::Error::other(format!("QP {}: {name}, {:?}", wc.qp_num, slot)));
                }
                if wc.opcode == verbs::IBV_WC_RECV {
                    let slot = wc.wr_id as usize;
                    self.memory
                        .verify(Self::room(slot), LEN, seed(slot ^ 1))
                        .map_err(|m| io::Error::other(format!("message to QP {}: {m}", wc.qp_num)))?;
                    got += 1;
                } else {
                    sent += 1;
                }
            }
        }
        Ok(())
    }

    /// Nanoseconds of each of `count` Writes, one after the other.
    fn write(&mut self, count: usize) -> io::Result<u128> {
        let Some(pair) = self.pairs.first().and_then(|p| p.first()) else {
            return Err(io::Error::other("no QP"));
        };
        if !self.early {
            self.connect(pair)?;
            self.early = true;
        }
        let wr = SendWr {
            sges: vec![self.mr.sge(Self::message(0), LEN)],
            opcode: verbs::IBV_WR_RDMA_WRITE,
            flags: verbs::IBV_SEND_SIGNALED,
            // Nobody looks at what is there.
            remote_addr: self.mr.addr(Self::message(1)),
            rkey: self.mr.rkey,
            ..SendWr::default()
        };
        let [a, _] = pair;
        let mut begin = Instant::now();
        for i in 0..=count {
            a.qp.post_send(std::slice::from_ref(&wr)).map_err(|e| io::Error::other(e.to_string()))?;
            match self.cq.poll_one(self.plan.wait)? {
                Some(wc) if wc.status == verbs::IBV_WC_SUCCESS => {}
                Some(wc) => return Err(io::Error::other(verbs::status_name(wc.status))),
                None => return Err(io::Error::other("a Write does not end")),
            }
            if i == 0 {
                // The first one waits for the connection.
                begin = Instant::now();
            }
        }
        Ok(begin.elapsed().as_nanos() / count.max(1) as u128)
    }
}

/// Process `index` of the plan: does what it is told. Its exit status.
pub fn serve(plan: &Plan, index: usize) -> i32 {
    let context = match Context::open(plan.device.name.as_deref()) {
        Ok(context) => context,
        Err(e) => {
            println!("error {e}");
            return 1;
        }
    };
    println!("ok open");
    let mut objects = None;
    for line in io::stdin().lines() {
        let Ok(line) = line else { return 1 };
        let done = match (line.split_whitespace().collect::<Vec<_>>().as_slice(), &mut objects) {
            (["make"], None) => Objects::make(plan, &context, index).map(|made| {
                objects = Some(made);
                String::new()
            }),
            (["first"], Some(o)) => o.connect_first().map(|()| String::new()),
            (["rest"], Some(o)) => o.connect_rest().map(|()| String::new()),
            (["send"], Some(o)) => o.send().map(|()| String::new()),
            (["write", count], Some(o)) => match count.parse() {
                Ok(count) => o.write(count).map(|ns| ns.to_string()),
                Err(_) => Err(io::Error::other("how many Writes?")),
            },
            (["drop"], Some(_)) => {
                objects = None;
                Ok(String::new())
            }
            (["end"], _) => return 0,
            _ => Err(io::Error::other(format!("'{line}' at this time"))),
        };
        match done {
            Ok(text) => println!("ok {text}"),
            Err(e) => println!("error {e}"),
        }
        let _ = io::stdout().flush();
    }
    0
}
