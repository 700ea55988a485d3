// SPDX-License-Identifier: GPL-2.0
//! Life and death of objects: devices that go away, processes that are killed, destroy against
//! everything else.

#![forbid(unsafe_code)]

use crate::completions::expect_event;
use crate::setup::run_command;
use crate::Run;
use selftests::args::Args;
use selftests::endpoint::{self, Device, Endpoint, Tuning, ALL_ACCESS};
use selftests::ktap::Outcome;
use selftests::rng::Rng;
use selftests::single::Single;
use selftests::sys::{self, errno};
use selftests::verbs::{self, Connect, Context, QpInit, SendWr, Wc};
use selftests::{check, fail, skip};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
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

/// A process is killed while its QP resends, at many different moments. Its requests go to a
/// QP that does not exist.
pub fn kill_in_retransmission(run: &Run, ep: &Endpoint) -> Outcome {
    let gid = |g: &[u8; 16]| format!("{:032x}", u128::from_be_bytes(*g));
    let (high, low) = ep.gid.split_at(8);
    let word = |half: &[u8]| u64::from_be_bytes(half.try_into().unwrap_or([0; 8]));
    let theirs = ep.oob().exchange(&[word(high), word(low)]).map_err(s)?;
    if ep.leads {
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
            let mut line = String::new();
            if let Some(out) = child.stdout.take() {
                BufReader::new(out).read_line(&mut line).map_err(s)?;
            }
            check!(line.trim() == "posted", "round {round}: the child said '{}'", line.trim());
            // Up to 40 ms, within several retransmissions (timeout code 8 is 1 ms).
            let moment = Duration::from_micros(Rng::of(&[run.seed, 90, round]).below(40_000));
            let until = Instant::now() + moment;
            while Instant::now() < until {
                sys::yield_now();
            }
            child.kill().map_err(s)?;
            child.wait().map_err(s)?;
        }
    }
    ep.barrier("killed").map_err(s)?;
    // The device still works.
    works(ep, "after the kills")
}

/// A Write each way on a new QP.
pub fn works(ep: &Endpoint, what: &str) -> Outcome {
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
    Ok(())
}

/// The child of `kill_in_retransmission`: resends until it is killed.
pub fn child_orphan(mut args: Args) -> i32 {
    let device = Device::from_args(&mut args);
    let peer = args.text("--peer").unwrap_or_default();
    let go = || -> Result<(), String> {
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
        for i in 0..8 {
            let qp = pd.create_qp(&QpInit::rc(&cq, &cq, 16, 1, 0)).map_err(s)?;
            qp.init(ALL_ACCESS).map_err(s)?;
            let connect = Connect {
                qpn: 0xfa_0000 + i,
                gid,
                gid_index: index as u8,
                rq_psn: 7,
                sq_psn: 7,
                mtu: context.query_port(1).map_err(s)?.active_mtu,
                rd_atomic: 1,
                dest_rd_atomic: 1,
                timeout: 8,
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
        std::thread::sleep(Duration::from_secs(60));
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

/// One thread makes and destroys CQs and QPs, another maps whatever it finds at the offsets of
/// the device file: mappings fail or work, nothing else.
pub fn mmap_against_destroy(run: &Run, ep: &Endpoint) -> Outcome {
    if !ep.leads {
        return works(ep, "after the mappings");
    }
    let stop = AtomicBool::new(false);
    let context = &ep.context;
    let mut hits = 0u64;
    let outcome: Outcome = std::thread::scope(|scope| {
        let mapper = scope.spawn(|| {
            let mut rng = Rng::of(&[run.seed, 91]);
            let mut hits = 0u64;
            while !stop.load(Ordering::Relaxed) {
                hits += u64::from(sys::probe_mmap(context.cmd_fd(), rng.below(4096) as i64));
            }
            hits
        });
        let result = (|| {
            for round in 0..run.rounds * 20 {
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
        hits = mapper.join().unwrap_or(0);
        result
    });
    outcome?;
    selftests::ktap::note(&format!("{hits} mappings were caught"));
    works(ep, "after the mappings")
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
    works(ep, "after the processes")
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
