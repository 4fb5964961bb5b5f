//! Cases, the worlds they run in, and a test for each suite and world size.
//!
//! One world runs all cases of a suite, one after the other, because starting a world costs more
//! than most cases. A runner that starts a process per test then starts a world per suite.

use std::error::Error;
use std::ffi::OsString;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use libtest_mimic::{Arguments, Failed, Trial};
use trainyard_elastic::{Console, Job, launch, worker};

use crate::record::{Line, Record, failures, times};
use crate::{Rank, programs};

/// How a case ends.
pub type Outcome = Result<(), Box<dyn Error>>;

/// What is run on every rank.
#[derive(Clone, Copy)]
pub struct Case {
    /// What it shows, in words joined by underscores.
    pub name: &'static str,
    /// The rank's part.
    pub run: fn(&Rank) -> Outcome,
}

/// Cases that share a world.
#[derive(Clone, Copy)]
pub struct Suite {
    /// Its name.
    pub name: &'static str,
    /// The world sizes it runs on.
    pub sizes: &'static [usize],
    /// What it runs, in order.
    pub cases: &'static [Case],
}

/// The rank's command: `__rank SUITE`.
const RANK: &str = "__rank";

/// Where ranks write what they found.
const FOLDER: &str = "TRAINYARD_CONFORMANCE_FOLDER";

/// The `main` of a test program: a test per suite and world size, and the ranks themselves.
pub fn main(suites: &'static [Suite]) -> ExitCode {
    if let Some(code) = worker::intercept() {
        return code;
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [command, suite] = args.as_slice()
        && command == RANK
    {
        return match run_rank(suites, suite) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    in_turn(trials(suites))
}

/// Runs tests one after the other: ranks of several worlds at once would only measure each other.
pub fn in_turn(trials: Vec<Trial>) -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trials(suites: &'static [Suite]) -> Vec<Trial> {
    let of_suite = |suite: &'static Suite| {
        suite.sizes.iter().map(move |&size| {
            let name = format!("{}::on_{size}_ranks", suite.name);
            Trial::test(name, move || run_world(suite, size))
        })
    };
    suites.iter().flat_map(of_suite).collect()
}

/// Starts a world, waits for its end, and reads what its ranks found.
fn run_world(suite: &Suite, size: usize) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let mut job = Job::new(std::env::current_exe()?, size)
        .args([OsString::from(RANK), suite.name.into()])
        .env(FOLDER, folder.path())
        .console(Console::Silent);
    // The front door starts faster than this program, which holds libtorch; use it where it is.
    if let Ok(front_door) = programs::find("trainyard") {
        job = job.trampoline(front_door);
    }
    let outcome = launch(&job)?;
    print!("{}", times(folder.path(), size));
    let names: Vec<&str> = suite.cases.iter().map(|case| case.name).collect();
    let ends: Vec<String> = outcome
        .ends
        .iter()
        .map(|end| format!("{}\n{}", end.how, end.last_lines.join("\n")))
        .collect();
    match failures(folder.path(), &names, &ends) {
        Some(text) => Err(text.into()),
        None if !outcome.is_success() => Err(outcome.report().unwrap_or_default().into()),
        None => Ok(()),
    }
}

/// One rank's life: every case in order, whatever became of those before.
fn run_rank(suites: &[Suite], name: &str) -> Outcome {
    let suite = suites
        .iter()
        .find(|suite| suite.name == name)
        .ok_or_else(|| format!("no suite {name:?}"))?;
    let folder = std::env::var_os(FOLDER).ok_or_else(|| format!("{FOLDER} is not set"))?;
    remember_panics();
    tch::set_num_threads(1);
    let rank = Rank::from_env()?;
    let mut record = Record::create(folder.as_ref(), rank.index())?;
    for (index, case) in suite.cases.iter().enumerate() {
        rank.begin_case(index);
        let started = Instant::now();
        let failure = run_case(case, &rank).err();
        record.write(&Line {
            case: case.name.to_owned(),
            ended_ms: SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis() as u64,
            seconds: started.elapsed().as_secs_f64(),
            failure: failure.clone(),
            told: rank.told(),
        })?;
        rank.end_case(failure.is_some())?;
    }
    Ok(())
}

fn run_case(case: &Case, rank: &Rank) -> Result<(), String> {
    match panic::catch_unwind(AssertUnwindSafe(|| (case.run)(rank))) {
        Ok(outcome) => outcome.map_err(|error| error.to_string()),
        Err(_) => Err(LAST_PANIC
            .lock()
            .map_or_else(|p| p.into_inner().clone(), |text| text.clone())),
    }
}

/// The words of the last panic, with its place.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

fn remember_panics() {
    panic::set_hook(Box::new(|info| {
        let text = info.to_string();
        eprintln!("{text}");
        if let Ok(mut last) = LAST_PANIC.lock() {
            *last = text;
        }
    }));
}

/// Runs `body` and fails if it took longer than `limit`.
pub fn within<T>(limit: Duration, what: &str, body: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let out = body();
    let took = started.elapsed();
    assert!(took <= limit, "{what} took {took:.1?}, more than {limit:?}");
    out
}
