// SPDX-License-Identifier: GPL-2.0
//! Life and death of objects: devices that go away, processes that are killed, destroy against
//! everything else.

#![forbid(unsafe_code)]

use crate::completions::expect_event;
use crate::setup::run_command;
use crate::Run;
use selftests::args::Args;
use selftests::endpoint::{self, Device, Endpoint, Tuning, ALL_ACCESS, RING_LENGTHS, RING_PAGES};
use selftests::ktap::Outcome;
use selftests::rng::Rng;
use selftests::single::Single;
use selftests::sys::{self, errno};
use selftests::verbs::{self, Connect, Context, QpInit, SendWr, Wc};
use selftests::{check, fail, skip};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn s(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The device is deleted under PD, MR, CQ and a QP with traffic: the process gets
/// IBV_EVENT_DEVICE_FATAL, its calls fail, its objects can be destroyed, and the device can be
/// made anew.
pub fn device_deleted(run: &Run, ep: &Endpoint) -> Outcome {
    let single = Single::new(ep, &Tuning { timeout: 12, retry_cnt: 1, ..Tuning::default() }, 64, 1, 0)?;
    let mr = ep.memory(1 << 20, ALL_ACCESS).map_err(s)?;
    let remote = ep.exchange_memory(&[&mr]).map_err(s)?[0];
    if !ep.leads {
        ep.barrier("gone").map_err(s)?;
        return Ok(());
    }
    let Some(netdev) = &run.netdev else { skip!("--netdev is not given") };
    let write = |id| SendWr {
        wr_id: id,
        sges: vec![mr.sge(0, 200_000)],
        opcode: verbs::IBV_WR_RDMA_WRITE,
        flags: verbs::IBV_SEND_SIGNALED,
        remote_addr: remote.addr + 300_000,
        rkey: remote.rkey,
        ..SendWr::default()
    };
    let list: Vec<SendWr> = (0..32).map(write).collect();
    single.qp.post_send(&list).map_err(s)?;
    let name = ep.context.name.clone();
    if let Err(error) = run_command(&["rdma", "link", "delete", &name]) {
        skip!("{error}");
    }
    let result = (|| {
        expect_event(ep, 0, verbs::IBV_EVENT_DEVICE_FATAL)?;
        // What is in the CQ may be taken; then nothing hangs and nothing succeeds any more.
        let mut wcs = vec![Wc::default(); 64];
        while single.qp.send_cq.poll(&mut wcs).is_ok_and(|n| n > 0) {}
        match ep.context.query_port(1) {
            Ok(_) => fail!("query_port works on a deleted device"),
            Err(e) => check!(e.raw_os_error() == Some(errno::EIO), "query_port on a deleted device: {e}"),
        }
        match ep.context.create_cq(16, None) {
            Ok(_) => fail!("create_cq works on a deleted device"),
            Err(e) => check!(e.raw_os_error() == Some(errno::EIO), "create_cq on a deleted device: {e}"),
        }
        check!(single.qp.set_state(verbs::IBV_QPS_ERR).is_err(), "modify_qp works on a deleted device");
        // Posting fails at once, or the request never completes with success.
        if single.qp.post_send(&[write(99)]).is_ok() {
            let end = Instant::now() + Duration::from_millis(200);
            while let Some(wc) =
                single.qp.send_cq.poll_one(end.saturating_duration_since(Instant::now())).unwrap_or(None)
            {
                check!(
                    wc.wr_id != 99 || wc.status != verbs::IBV_WC_SUCCESS,
                    "a request on a deleted device succeeded"
                );
            }
        }
        Ok(())
    })();
    // The next cases want a device, whatever happened here.
    let added = run_command(&["rdma", "link", "add", &name, "type", &run.kind, "netdev", netdev]);
    let back = added.is_ok()
        && sys::busywait(ep.wait, || {
            Context::open(Some(&name)).is_ok_and(|c| endpoint::choose_gid(&c, &run.device).is_ok())
        });
    ep.barrier("gone").map_err(s)?;
    result?;
    added?;
    check!(back, "{name} did not come back");
    Ok(())
}

/// ACK timeout of a QP that sends to nobody, 0.27 s: with seven retries it goes on for 2.1 s.
const ORPHAN_TIMEOUT: u8 = 16;

/// A process is killed while its QPs resend, at many different moments. Their requests go to QPs
/// that do not exist: each refusal makes a QP send all of its packets again, after a wait that
/// doubles up to 128 ms. They have the connection of a QP that stays: to a device none of whose
/// QPs knows of them they would send nothing. (case05_killed_in_mid_retransmission in behaviour.sh is about timers.)
pub fn kill_in_retransmission(run: &Run, ep: &Endpoint) -> Outcome {
    let gid = |g: &[u8; 16]| format!("{:032x}", u128::from_be_bytes(*g));
    let (high, low) = ep.gid.split_at(8);
    let word = |half: &[u8]| u64::from_be_bytes(half.try_into().unwrap_or([0; 8]));
    let theirs = ep.oob().exchange(&[word(high), word(low)]).map_err(s)?;
    let _stays = works(ep, "before the kills")?;
    if ep.leads {
        // What the device sends again, by its own counters, and what it is refused.
        let counted = || ep.counters(["sent_pkts", "rcvd_rnr_err"]);
        let mut peer = [0; 16];
        peer[..8].copy_from_slice(&theirs[0].to_be_bytes());
        peer[8..].copy_from_slice(&theirs[1].to_be_bytes());
        let program = std::env::current_exe().map_err(s)?;
        for round in 0..run.rounds {
            let mut child = Command::new(&program)
                .args([
                    "--child-orphan",
                    "--dev",
                    &ep.context.name,
                    "--gid",
                    &ep.gid_index.to_string(),
                    "--peer",
                    &gid(&peer),
                ])
                .stdout(Stdio::piped())
                .spawn()
                .map_err(s)?;
            let mut out = BufReader::new(child.stdout.take().ok_or("the child has no output")?);
            let mut line = String::new();
            out.read_line(&mut line).map_err(s)?;
            check!(line.trim() == "posted", "round {round}: the child said '{}'", line.trim());
            if ep.is_metaroce() {
                // Each of its QPs has been refused and goes on; the packets are out again.
                let [sent, refused] = counted().map_err(s)?;
                let mut now = [0; 2];
                let resends = sys::busywait(ep.wait, || {
                    now = counted().unwrap_or_default();
                    now[0] > sent && now[1] > refused + ORPHANS
                });
                check!(
                    resends,
                    "round {round}: from {sent} to {} packets, from {refused} to {} refusals",
                    now[0],
                    now[1]
                );
            }
            // Up to 40 ms more.
            let moment = Duration::from_micros(Rng::of(&[run.seed, 90, round]).below(40_000));
            let until = Instant::now() + moment;
            while Instant::now() < until {
                sys::yield_now();
            }
            child.kill().map_err(s)?;
            child.wait().map_err(s)?;
            line.clear();
            out.read_line(&mut line).map_err(s)?;
            check!(line.is_empty(), "round {round}: before it was killed the child said '{}'", line.trim());
        }
    }
    ep.barrier("killed").map_err(s)?;
    // The device still works.
    works(ep, "after the kills").map(drop)
}

/// A Write each way on a new QP, which is returned.
pub fn works(ep: &Endpoint, what: &str) -> Outcome<Single> {
    let single = Single::new(ep, &Tuning::default(), 8, 1, 0)?;
    let mr = ep.memory(65536, ALL_ACCESS).map_err(s)?;
    let remote = ep.exchange_memory(&[&mr]).map_err(s)?[0];
    mr.memory.fill(0, 20_000, u64::from(ep.leads));
    let wr = SendWr {
        sges: vec![mr.sge(0, 20_000)],
        opcode: verbs::IBV_WR_RDMA_WRITE,
        remote_addr: remote.addr + 30_000,
        rkey: remote.rkey,
        ..SendWr::default()
    };
    single.run(ep, what, wr)?;
    ep.barrier("works").map_err(s)?;
    mr.memory.verify(30_000, 20_000, u64::from(!ep.leads)).map_err(|e| format!("{what}: {e}"))?;
    Ok(single)
}

/// QPs of the child of `kill_in_retransmission`.
const ORPHANS: u64 = 8;

/// The child of `kill_in_retransmission`: resends until it is killed, and speaks when that ends
/// earlier.
pub fn child_orphan(mut args: Args) -> i32 {
    let device = Device::from_args(&mut args);
    let peer = args.text("--peer").unwrap_or_default();
    let go = || -> Result<std::convert::Infallible, String> {
        let context = Context::open(device.name.as_deref()).map_err(s)?;
        let (index, _) = endpoint::choose_gid(&context, &device).map_err(s)?;
        let mut gid = [0u8; 16];
        for (i, byte) in gid.iter_mut().enumerate() {
            let digits = peer.get(2 * i..2 * i + 2).ok_or("--peer takes 32 hexadecimal digits")?;
            *byte = u8::from_str_radix(digits, 16).map_err(s)?;
        }
        let pd = context.alloc_pd().map_err(s)?;
        let cq = context.create_cq(128, None).map_err(s)?;
        let memory = Arc::new(sys::Memory::new(1 << 20).map_err(s)?);
        let mr = pd.reg(&memory, ALL_ACCESS).map_err(s)?;
        let mut qps = Vec::new();
        for i in 0..ORPHANS {
            let qp = pd.create_qp(&QpInit::rc(&cq, &cq, 16, 1, 0)).map_err(s)?;
            qp.init(ALL_ACCESS).map_err(s)?;
            let connect = Connect {
                qpn: 0xfa_0000 + i as u32,
                gid,
                gid_index: index as u8,
                rq_psn: 7,
                sq_psn: 7,
                mtu: context.query_port(1).map_err(s)?.active_mtu,
                rd_atomic: 1,
                dest_rd_atomic: 1,
                timeout: ORPHAN_TIMEOUT,
                retry_cnt: 7,
                rnr_retry: 7,
                min_rnr_timer: 12,
                traffic_class: 0,
            };
            qp.to_rtr(&connect).map_err(s)?;
            qp.to_rts(&connect).map_err(s)?;
            let wr = |id| SendWr {
                wr_id: id,
                sges: vec![mr.sge(0, 100_000)],
                opcode: if id % 3 == 0 { verbs::IBV_WR_RDMA_READ } else { verbs::IBV_WR_RDMA_WRITE },
                flags: verbs::IBV_SEND_SIGNALED,
                remote_addr: 4096,
                rkey: 1,
                ..SendWr::default()
            };
            let list: Vec<SendWr> = (0..8).map(wr).collect();
            qp.post_send(&list).map_err(s)?;
            qps.push(qp);
        }
        println!("posted");
        // Until it is killed; the parent's end closes stdin of nobody, so a limit is needed.
        match cq.poll_one(Duration::from_secs(60)).map_err(s)? {
            Some(wc) => Err(format!("request {}: {}", wc.wr_id, verbs::status_name(wc.status))),
            None => Err("nobody killed it".into()),
        }
    };
    let Err(error) = go();
    println!("{error}");
    1
}

/// One thread makes and destroys CQs and QPs, another maps their rings wherever they may be in the
/// device file, until it has had many of them: mappings fail or work, nothing else.
pub fn mmap_against_destroy(run: &Run, ep: &Endpoint) -> Outcome {
    if !ep.leads {
        return works(ep, "after the mappings").map(drop);
    }
    // Only of this driver is it known where rings are, and how long.
    let least = if ep.is_metaroce() { run.rounds } else { 0 };
    let (stop, hits, probes) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let context = &ep.context;
    let outcome: Outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = Rng::of(&[run.seed, 91]);
            while !stop.load(Ordering::Relaxed) {
                let pages = 1 + rng.below(RING_LENGTHS) as usize;
                let hit = sys::probe_mmap(context.cmd_fd(), rng.below(RING_PAGES), pages);
                hits.fetch_add(u64::from(hit), Ordering::Relaxed);
                probes.fetch_add(1, Ordering::Relaxed);
            }
        });
        let end = Instant::now() + ep.wait;
        let result = (|| {
            let enough = |round| round >= run.rounds * 20 && hits.load(Ordering::Relaxed) >= least;
            for round in (0..).take_while(|round| !enough(*round)) {
                check!(
                    round < run.rounds * 20 || Instant::now() < end,
                    "only {} of {} mappings met a ring in {round} rounds, {least} are due (seed {})",
                    hits.load(Ordering::Relaxed),
                    probes.load(Ordering::Relaxed),
                    run.seed
                );
                let cq = ep.cq(64).map_err(|e| format!("round {round}: create_cq: {e}"))?;
                let qp = ep
                    .qp(&QpInit::rc(&cq, &cq, 8, 1, 0))
                    .map_err(|e| format!("round {round}: create_qp: {e}"))?;
                drop(qp);
                drop(cq);
            }
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        result
    });
    outcome?;
    selftests::ktap::note(&format!(
        "{} of {} mappings met a ring",
        hits.load(Ordering::Relaxed),
        probes.load(Ordering::Relaxed)
    ));
    works(ep, "after the mappings").map(drop)
}

/// A process that ends with a thousand QPs and regions open: everything is given back.
pub fn thousands_at_once(run: &Run, ep: &Endpoint) -> Outcome {
    if ep.leads {
        let program = std::env::current_exe().map_err(s)?;
        let start = Instant::now();
        for round in 0..2 {
            let output = Command::new(&program)
                .args(["--child-many", "--dev", &ep.context.name])
                .output()
                .map_err(s)?;
            check!(
                output.status.success(),
                "round {round}: {} {}{}",
                output.status,
                String::from_utf8_lossy(&output.stdout).trim(),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        selftests::ktap::note(&format!(
            "two processes with a thousand of each in {:.1} s",
            start.elapsed().as_secs_f64()
        ));
    }
    let _ = run;
    ep.barrier("closed").map_err(s)?;
    works(ep, "after the processes").map(drop)
}

/// The child of `thousands_at_once`: makes many objects and ends without destroying one.
pub fn child_many(mut args: Args) -> i32 {
    let device = Device::from_args(&mut args);
    let go = || -> Result<(), String> {
        let context = Context::open(device.name.as_deref()).map_err(s)?;
        let attr = context.query_device().map_err(s)?;
        let pd = context.alloc_pd().map_err(s)?;
        let cq = context.create_cq(1024, None).map_err(s)?;
        let memory = Arc::new(sys::Memory::new(1 << 20).map_err(s)?);
        let (mut mrs, mut qps) = (Vec::new(), Vec::new());
        for i in 0..1000.min(attr.max_mr - 1) {
            mrs.push(
                pd.reg_mr(&memory, (i as usize % 200) * 4096, 8192, ALL_ACCESS)
                    .map_err(|e| format!("reg_mr {i}: {e}"))?,
            );
        }
        for i in 0..1000.min(attr.max_qp - 8) {
            let qp =
                pd.create_qp(&QpInit::rc(&cq, &cq, 4, 1, 0)).map_err(|e| format!("create_qp {i}: {e}"))?;
            qp.init(ALL_ACCESS).map_err(|e| format!("INIT {i}: {e}"))?;
            qps.push(qp);
        }
        // Ends here, with everything open.
        std::mem::forget((mrs, qps, cq, pd, context));
        Ok(())
    };
    match go() {
        Ok(()) => 0,
        Err(error) => {
            println!("{error}");
            1
        }
    }
}
