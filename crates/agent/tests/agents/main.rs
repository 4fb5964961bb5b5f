//! Runs of real agents with real workers, at the built-in server and in etcd. The program is its own
//! agent (to be killed and listened to) and its own trampoline, so the tests need no other program than a
//! shell, and etcd.

mod etcd;
mod machine;
mod runs;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use trainyard_elastic::worker;

use etcd::Etcd;
use runs::Venue;

fn main() -> ExitCode {
    if let Some(code) = worker::intercept() {
        return code;
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [command, args @ ..] = args.as_slice()
        && command == "agent"
    {
        return machine::be_an_agent(args);
    }
    libtest_mimic::run(&Arguments::from_args(), trials()).exit_code()
}

/// What must hold, and how it is tried.
type Test = (&'static str, fn(&Venue));

fn trials() -> Vec<Trial> {
    let runs: [Test; 5] = [
        ("a_run_ends_when_all_succeed", runs::success),
        ("a_lost_agent_and_its_return", runs::lost_and_back),
        ("a_failed_worker_and_the_end_of_patience", runs::failures),
        ("a_terminated_agent_leaves_at_once", runs::leaving),
        ("a_hung_agent_loses_its_place", runs::hung),
    ];
    let at_the_server = runs.map(|(name, run)| {
        Trial::test(format!("server::{name}"), move || {
            run(&Venue::server());
            Ok::<(), Failed>(())
        })
    });
    let moves: Test = ("the_store_moves_to_a_survivor", runs::store_moves);
    let in_etcd = runs.into_iter().chain([moves]).map(|(name, run)| {
        let name = format!("etcd::{name}");
        Trial::test(name.clone(), move || {
            if let Some(etcd) = Etcd::start(&name) {
                run(&Venue::etcd(&etcd));
            }
            Ok::<(), Failed>(())
        })
    });
    at_the_server.into_iter().chain(in_etcd).collect()
}
