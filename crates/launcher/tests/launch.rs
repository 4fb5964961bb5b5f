//! Jobs of real processes. The test program also acts as launcher (`launcher`, so that tests can kill it and read its
//! output) and as trampoline, so the tests need no other program than a shell.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use trainyard_launcher::{Console, ExitStatus, Job, LaunchError, Signals, Workers, launch, worker};

const SOON: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    if let Some(code) = worker::intercept() {
        return code;
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [command, nproc, script] = args.as_slice()
        && command == "launcher"
    {
        return launcher(nproc.parse().unwrap(), script);
    }
    libtest_mimic::run(&Arguments::from_args(), trials()).exit_code()
}

/// The main function of a program that launches a job: runs it, reports and exits.
fn launcher(nproc: usize, script: &str) -> ExitCode {
    let outcome = launch(&shell(nproc, script)).unwrap();
    if let Some(report) = outcome.report() {
        eprintln!("{report}");
    }
    outcome.exit_code().into()
}

fn trials() -> Vec<Trial> {
    let trials: [(&str, fn()); 22] = [
        ("ranks_get_the_environment_of_torchrun", environment),
        ("lines_are_prefixed_and_keep_their_stream", prefixes),
        ("a_console_can_be_plain_or_silent", plain_console),
        ("an_incomplete_last_line_is_printed", unfinished_line),
        ("success_has_exit_code_zero_and_no_report", success),
        ("the_first_failure_is_reported_first", first_failure),
        (
            "a_killed_rank_is_reported_and_the_others_are_stopped",
            killed_rank,
        ),
        ("the_report_has_the_last_lines_of_stderr", last_lines),
        ("a_rank_that_ignores_sigterm_is_killed", stubborn_rank),
        (
            "a_rank_whose_heartbeat_stops_is_killed_and_reported",
            hung_rank,
        ),
        ("a_rank_without_heartbeats_is_not_killed", no_heartbeat),
        ("a_signal_ends_the_starting_of_ranks", interrupted_start),
        ("children_of_ranks_are_killed", grandchildren),
        (
            "leftover_children_of_successful_ranks_are_killed",
            leftovers,
        ),
        (
            "a_process_that_escapes_does_not_block_the_launcher",
            escaped,
        ),
        ("a_killed_launcher_leaves_no_process", killed_launcher),
        (
            "ranks_die_with_the_launcher_even_without_reaper",
            killed_reaper,
        ),
        ("sigterm_is_forwarded", sigterm),
        ("sigint_is_forwarded", sigint),
        ("nohup_is_respected", nohup),
        ("jobs_that_cannot_start_are_rejected", rejections),
        (
            "an_orphaned_trampoline_does_not_execute_its_program",
            orphaned_trampoline,
        ),
    ];
    let as_trial = |(name, test): (&str, fn())| {
        Trial::test(name, move || {
            test();
            Ok::<(), Failed>(())
        })
    };
    trials.into_iter().map(as_trial).collect()
}

/// A job of shells, which read their rank from `$RANK`.
fn shell(nproc: usize, script: &str) -> Job {
    Job::new("sh", nproc).args(["-c", script])
}

fn quiet(nproc: usize, script: &str) -> Job {
    shell(nproc, script).console(Console::Silent)
}

/// A launcher in its own process, marked so that all of its processes can be found.
fn start_launcher(nproc: usize, script: &str, mark: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["launcher", &nproc.to_string(), script])
        .env("MARK", mark)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn run_launcher(nproc: usize, script: &str) -> Output {
    start_launcher(nproc, script, "").output().unwrap()
}

/// A mark that no other process has in its environment.
fn new_mark(name: &str) -> String {
    format!("{name}-{}", std::process::id())
}

/// The processes, zombies aside, with `MARK=mark` in their environment.
fn marked(mark: &str) -> Vec<i32> {
    let wanted = format!("MARK={mark}");
    let is_marked = |pid: &i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment
            .split(|byte| *byte == 0)
            .any(|variable| variable == wanted.as_bytes())
    };
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(is_marked)
        .collect()
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < SOON, "not within {SOON:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn assert_all_gone(mark: &str) {
    wait_until("no process left", || marked(mark).is_empty());
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap()
}

fn sorted_lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = bytes.lines().map(Result::unwrap).collect();
    lines.sort();
    lines
}

/// A shell command that waits until a file exists.
fn until_exists(path: &Path) -> String {
    format!("until [ -e {0} ]; do sleep 0.01; done", path.display())
}

fn environment() {
    let logs = TempDir::new().unwrap();
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK \
                  $GROUP_WORLD_SIZE $ROLE_RANK $ROLE_WORLD_SIZE $ROLE_NAME $MASTER_ADDR \
                  $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_RUN_ID \
                  $TORCHELASTIC_USE_AGENT_STORE $EXTRA [$TRAINYARD_TRAMPOLINE]; echo $MASTER_PORT";
    let job = quiet(3, script).log_dir(logs.path()).env("EXTRA", "more");
    assert!(launch(&job).unwrap().is_success());
    let mut ports = Vec::new();
    for rank in 0..3 {
        let text = read(logs.path().join(format!("{rank}/stdout.log")));
        let (variables, port) = text.trim_end().split_once('\n').unwrap();
        let expected = format!("{rank} {rank} 3 3 0 1 {rank} 3 default 127.0.0.1 0 0 none False");
        assert_eq!(variables, format!("{expected} more []"));
        ports.push(port.parse::<u16>().unwrap());
    }
    assert!(ports[0] > 0 && ports.iter().all(|port| *port == ports[0]));
}

fn prefixes() {
    let output = run_launcher(2, "echo out $RANK; echo more; echo err $RANK >&2");
    assert!(output.status.success());
    let expected = [
        "[rank0]: more",
        "[rank0]: out 0",
        "[rank1]: more",
        "[rank1]: out 1",
    ];
    assert_eq!(sorted_lines(&output.stdout), expected);
    let expected = ["[rank0]: err 0", "[rank1]: err 1"];
    assert_eq!(sorted_lines(&output.stderr), expected);
}

fn plain_console() {
    let logs = TempDir::new().unwrap();
    let mut job = shell(2, "echo from $RANK").log_dir(logs.path());
    job.output.console = Console::Plain;
    job.output.console_ranks = Some(vec![]);
    assert!(launch(&job).unwrap().is_success());
    assert_eq!(read(logs.path().join("1/stdout.log")), "from 1\n");
    assert_eq!(read(logs.path().join("1/stderr.log")), "");
}

fn unfinished_line() {
    let output = run_launcher(1, "printf 'no end'");
    assert_eq!(output.stdout, b"[rank0]: no end\n");
}

fn success() {
    let outcome = launch(&quiet(4, "exit 0")).unwrap();
    assert_eq!(outcome.exit_code(), 0);
    assert_eq!(outcome.first_failure, None);
    assert_eq!(outcome.report(), None);
    assert!(
        outcome
            .exits
            .iter()
            .all(|exit| exit.status == ExitStatus::Exited(0))
    );
}

fn first_failure() {
    let script = "if [ $RANK = 1 ]; then exit 3; fi; exec sleep 1000";
    let start = Instant::now();
    let outcome = launch(&quiet(3, script)).unwrap();
    assert!(start.elapsed() < SOON);
    assert_eq!(outcome.first_failure, Some(1));
    assert_eq!(outcome.exit_code(), 3);
    let report = outcome.report().unwrap();
    let pid = outcome.exits[1].pid;
    let first = format!("rank 1 (pid {pid}) exited with code 3");
    assert!(report.starts_with(&first), "{report}");
    assert!(report.contains("rank 0"), "{report}");
    assert!(report.contains("the launcher sent SIGTERM"), "{report}");
}

fn killed_rank() {
    let mark = new_mark("killed_rank");
    let script = "if [ $RANK = 1 ]; then kill -9 $$; fi; exec sleep 1000";
    let start = Instant::now();
    let outcome = launch(&quiet(4, script).env("MARK", &mark)).unwrap();
    assert!(start.elapsed() < SOON);
    assert_eq!(outcome.exit_code(), 137);
    let report = outcome.report().unwrap();
    let first = format!(
        "rank 1 (pid {}) was killed by SIGKILL",
        outcome.exits[1].pid
    );
    assert!(report.starts_with(&first), "{report}");
    assert!(marked(&mark).is_empty());
}

fn last_lines() {
    let script = "for i in $(seq 50); do echo line $i >&2; done; printf end >&2; exit 1";
    let outcome = launch(&quiet(1, script)).unwrap();
    let lines = &outcome.exits[0].stderr_tail;
    assert_eq!(lines.len(), 20);
    assert_eq!(lines[..1], ["line 32"]);
    assert_eq!(lines[18..], ["line 50", "end"]);
    assert!(outcome.report().unwrap().contains("| line 50\n    | end"));
}

fn stubborn_rank() {
    let dir = TempDir::new().unwrap();
    let ready = dir.path().join("ready");
    let script = format!(
        "if [ $RANK = 0 ]; then trap '' TERM; touch {}; while :; do sleep 1; done; fi; {}; exit 1",
        ready.display(),
        until_exists(&ready)
    );
    let mut job = quiet(2, &script);
    job.grace = Duration::from_millis(200);
    let outcome = launch(&job).unwrap();
    assert_eq!(outcome.first_failure, Some(1));
    assert_eq!(outcome.exits[0].status, ExitStatus::Signaled(9));
    assert!(outcome.report().unwrap().contains("did not stop in time"));
}

fn hung_rank() {
    let heartbeat = r#"{"rank": 1, "stage": "stepping", "step": 7, "p99_step_ns": 1000000}"#;
    let script = format!(
        "if [ $RANK = 1 ]; then echo '{heartbeat}' | dd of=$TRAINYARD_HEARTBEATS bs=1 \
         seek=$TRAINYARD_HEARTBEAT_OFFSET conv=notrunc; fi; exec sleep 1000"
    );
    let start = Instant::now();
    let outcome = launch(&quiet(2, &script)).unwrap();
    let took = start.elapsed();
    assert!(
        took >= Duration::from_secs(3) && took < Duration::from_secs(6),
        "{took:?}"
    );
    assert_eq!(outcome.exit_code(), 137);
    let report = outcome.report().unwrap();
    let first = format!("rank 1 (pid {}) hung and was killed", outcome.exits[1].pid);
    assert!(report.starts_with(&first), "{report}");
    assert!(
        report.contains(": rank 1 is not running: its process has been stopped or starved for "),
        "{report}"
    );
    assert!(
        report.contains("\n  it was in step 7, before any collective\n"),
        "{report}"
    );
    assert!(report.contains("rank 0"), "{report}");
}

fn no_heartbeat() {
    let outcome = launch(&quiet(2, "exec sleep 6")).unwrap();
    assert!(outcome.is_success());
}

fn grandchildren() {
    let mark = new_mark("grandchildren");
    let dir = TempDir::new().unwrap();
    let ready = dir.path().join("ready");
    let script = format!(
        "if [ $RANK = 0 ]; then sleep 1000 & touch {}; wait; fi; {}; sleep 1000 & exit 1",
        ready.display(),
        until_exists(&ready)
    );
    let outcome = launch(&quiet(2, &script).env("MARK", &mark)).unwrap();
    assert_eq!(outcome.first_failure, Some(1));
    assert_all_gone(&mark);
}

fn leftovers() {
    let mark = new_mark("leftovers");
    let outcome = launch(&quiet(2, "sleep 1000 & exit 0").env("MARK", &mark)).unwrap();
    assert!(outcome.is_success());
    assert_all_gone(&mark);
}

fn escaped() {
    let mark = new_mark("escaped");
    let start = Instant::now();
    let outcome = launch(&quiet(1, "setsid sleep 1000 & exit 0").env("MARK", &mark)).unwrap();
    assert!(outcome.is_success());
    assert!(start.elapsed() < SOON);
    for pid in marked(&mark) {
        let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
    }
}

/// A launcher whose two ranks have each started a child and printed `ready`.
fn running_launcher(mark: &str, script: &str) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut launcher = start_launcher(2, script, mark).spawn().unwrap();
    let mut lines = BufReader::new(launcher.stdout.take().unwrap());
    for _ in 0..2 {
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        assert!(line.ends_with(": ready\n"), "{line:?}");
    }
    (launcher, lines)
}

fn killed_launcher() {
    let mark = new_mark("killed_launcher");
    let script = "trap '' TERM HUP INT; sleep 1000 & echo ready; wait; sleep 1000";
    let (mut launcher, _lines) = running_launcher(&mark, script);
    // The launcher, its reaper, two ranks and their children.
    wait_until("everything runs", || marked(&mark).len() == 6);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    assert_all_gone(&mark);
}

fn killed_reaper() {
    let mark = new_mark("killed_reaper");
    let (mut launcher, _lines) = running_launcher(&mark, "echo ready; exec sleep 1000");
    let is_reaper = |pid: &i32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.ends_with(b"--reaper\0")
    };
    let reapers: Vec<i32> = marked(&mark).into_iter().filter(is_reaper).collect();
    assert_eq!(reapers.len(), 1);
    kill_process(Pid::from_raw(reapers[0]).unwrap(), Signal::KILL).unwrap();
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    assert_all_gone(&mark);
}

fn forwarded(signal: Signal, name: &str) -> String {
    let mark = new_mark(name);
    let script = "trap 'echo signaled; exit 7' TERM INT; sleep 1000 & echo ready; wait";
    let (launcher, lines) = running_launcher(&mark, script);
    kill_process(Pid::from_child(&launcher), signal).unwrap();
    let lines_after: Vec<String> = lines.lines().map(Result::unwrap).collect();
    assert_eq!(lines_after.len(), 2, "{lines_after:?}");
    let output = launcher.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(128 + signal.as_raw()));
    assert_all_gone(&mark);
    String::from_utf8(output.stderr).unwrap()
}

fn sigterm() {
    let report = forwarded(Signal::TERM, "sigterm");
    assert!(report.contains("\ninterrupted by SIGTERM"), "{report}");
    assert!(report.contains("exited with code 7 after the launcher sent SIGTERM"));
}

fn sigint() {
    let report = forwarded(Signal::INT, "sigint");
    let notice = "received SIGINT: waiting up to 2 s for 2 ranks to stop;";
    assert!(report.starts_with(notice), "{report}");
    assert!(report.contains("\ninterrupted by SIGINT"), "{report}");
}

fn interrupted_start() {
    let signals = Signals::watch(&[]).unwrap();
    kill_process(rustix::process::getpid(), Signal::TERM).unwrap();
    wait_until("the signal has arrived", || signals.have_arrived());
    let mut workers = Workers::start(&quiet(1000, "sleep 1000"), &signals).unwrap();
    workers.signal(Signal::TERM);
    wait_until("the ranks have exited", || {
        workers.reap_exited().unwrap();
        workers.all_exited()
    });
    assert_eq!(workers.finish(None).exits.len(), 1);
}

fn nohup() {
    let dir = TempDir::new().unwrap();
    let go = dir.path().join("go");
    let script = format!("echo ready; {}", until_exists(&go));
    let mut command = Command::new("nohup");
    let launcher = start_launcher(2, &script, "");
    command
        .arg(launcher.get_program())
        .args(launcher.get_args())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut launcher = command.spawn().unwrap();
    let mut line = String::new();
    let mut lines = BufReader::new(launcher.stdout.take().unwrap());
    lines.read_line(&mut line).unwrap();
    kill_process(Pid::from_child(&launcher), Signal::HUP).unwrap();
    fs::write(&go, "").unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(0));
}

fn rejections() {
    let missing = launch(&Job::new("no-such-program", 1));
    assert!(matches!(missing, Err(LaunchError::ProgramNotFound { .. })));
    assert!(missing.unwrap_err().to_string().contains("no-such-program"));
    assert!(matches!(launch(&shell(0, "")), Err(LaunchError::NoRanks)));
    let mut job = quiet(2, "exit 0").log_dir("/dev/null/logs");
    assert!(matches!(launch(&job), Err(LaunchError::Log { .. })));
    job = quiet(2, "exit 0").trampoline("/no/such/trampoline");
    assert!(matches!(launch(&job), Err(LaunchError::Start { .. })));
}

fn orphaned_trampoline() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([worker::SUBCOMMAND, "999999999", "--", "echo", "started"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(126));
    assert_eq!(output.stdout, b"");
    assert!(String::from_utf8_lossy(&output.stderr).contains("the launcher"));
}
