//! Elastic runs of real agents and workers, with our own server and with etcd. The test program also acts as agent
//! (so that tests can kill it and read its output) and as trampoline, so the tests need no other program than a shell
//! and etcd.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod etcd;
mod hello;
mod node;
mod runs;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use trainyard_launcher::worker;

use etcd::Etcd;
use runs::Rendezvous;

fn main() -> ExitCode {
    if let Some(code) = worker::intercept() {
        return code;
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [command, args @ ..] = args.as_slice()
        && command == "agent"
    {
        return node::agent_main(args);
    }
    if args == ["hello"] {
        return hello::hello_main();
    }
    libtest_mimic::run(&Arguments::from_args(), trials()).exit_code()
}

/// The name of a test, and its function.
type Test = (&'static str, fn(&Rendezvous));

fn trials() -> Vec<Trial> {
    let runs: [Test; 5] = [
        ("a_run_ends_when_all_workers_succeed", runs::success),
        ("a_lost_agent_can_rejoin", runs::lost_and_back),
        (
            "a_failed_worker_is_restarted_until_no_restarts_are_left",
            runs::failures,
        ),
        ("a_terminated_agent_leaves_at_once", runs::leaving),
        ("a_hung_agent_loses_its_membership", runs::hung),
    ];
    let with_server = runs.map(|(name, run)| {
        Trial::test(format!("server::{name}"), move || {
            run(&Rendezvous::server());
            Ok::<(), Failed>(())
        })
    });
    let moves: Test = ("the_store_moves_to_a_survivor", runs::store_moves);
    let with_etcd = runs.into_iter().chain([moves]).map(|(name, run)| {
        let name = format!("etcd::{name}");
        Trial::test(name.clone(), move || {
            if let Some(etcd) = Etcd::start(&name) {
                run(&Rendezvous::etcd(&etcd));
            }
            Ok::<(), Failed>(())
        })
    });
    with_server.into_iter().chain(with_etcd).collect()
}
