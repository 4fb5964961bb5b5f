//! Suites of cases, and the world in which they run.
//!
//! One world runs all cases of a suite, one after the other, because starting a world costs more than most cases.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::error::Error;
use std::ffi::OsString;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use libtest_mimic::{Arguments, Failed, Trial};
use trainyard_launcher::{Console, Job, launch, worker};

use crate::record::{Line, Record, failures, times};
use crate::{Rank, accelerator, programs};

/// The result of a case.
pub type Outcome = Result<(), Box<dyn Error>>;

/// A function that runs on every rank of a world.
#[derive(Clone, Copy)]
pub struct Case {
    /// What the case asserts.
    pub name: &'static str,
    /// The code of every rank.
    pub run: fn(&Rank) -> Outcome,
}

/// Cases that share a world.
#[derive(Clone, Copy)]
pub struct Suite {
    /// The name of the suite, `MODULE::SUITE`.
    pub name: &'static str,
    /// World sizes of every CI run.
    pub sizes: &'static [usize],
    /// World sizes of full runs only.
    pub full_sizes: &'static [usize],
    /// The cases, in the order in which they run.
    pub cases: &'static [Case],
    /// Whether it runs a second time with ranks that send over the network instead of sharing memory.
    pub also_over_network: bool,
}

/// How the ranks of a world exchange tensors of the host.
#[derive(Clone, Copy)]
pub(crate) enum Transport {
    /// As usual: ranks of one node share memory.
    Usual,
    /// As ranks of several nodes do.
    Network,
}

/// The command line of a rank: `__rank SUITE`, or `__rank_over_network SUITE`.
const RANK: &str = "__rank";
const RANK_OVER_NETWORK: &str = "__rank_over_network";

/// The directory into which ranks write their results.
const FOLDER: &str = "TRAINYARD_CONFORMANCE_FOLDER";

/// The `main` of the test program. It is a rank if its command line says so; otherwise it runs one test per suite
/// and world size, and the tests of `others`.
pub fn main(suites: &[Suite], others: impl IntoIterator<Item = Trial>) -> ExitCode {
    if let Some(code) = worker::intercept() {
        return code;
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let transport = match args.first().map(String::as_str) {
        Some(RANK) => Some(Transport::Usual),
        Some(RANK_OVER_NETWORK) => Some(Transport::Network),
        _ => None,
    };
    if let ([_, suite], Some(transport)) = (args.as_slice(), transport) {
        return match run_rank(suites, suite, transport) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    // Tests run one after the other, because several worlds at once would compete for the cores.
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let trials = trials(suites).chain(others).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trials(suites: &[Suite]) -> impl Iterator<Item = Trial> {
    suites.iter().flat_map(|&suite| {
        let trial = move |&size: &usize| {
            let name = format!("{}::on_{size}_ranks", suite.name);
            Trial::test(name, move || run_world(&suite, size, Transport::Usual))
        };
        let over_network = move |&size: &usize| {
            let name = format!("{}::on_{size}_ranks_over_the_network", suite.name);
            Trial::test(name, move || run_world(&suite, size, Transport::Network))
        };
        let again = suite.sizes.iter().filter(move |_| suite.also_over_network);
        let full = suite.full_sizes.iter().map(trial).map(full_only);
        let usual = suite.sizes.iter().map(trial);
        usual.chain(again.map(over_network)).chain(full)
    })
}

/// Marks a test that only full CI runs execute (`.ci/run --full`).
pub fn full_only(trial: Trial) -> Trial {
    trial.with_ignored_flag(true)
}

/// Whether this is a full CI run: option matrices are complete instead of pairwise.
pub fn is_full_run() -> bool {
    std::env::var_os("TRAINYARD_FULL").is_some()
}

/// A test that starts all processes it needs itself.
pub type Test = fn() -> Outcome;

/// Turns functions into tests with the names `MODULE::NAME`.
pub fn as_trials(module: &str, tests: &[(&str, Test)]) -> Vec<Trial> {
    let trial = |&(name, test): &(&str, Test)| {
        Trial::test(format!("{module}::{name}"), move || {
            test().map_err(Failed::from)
        })
    };
    tests.iter().map(trial).collect()
}

/// Starts the ranks of a world, waits until they exit, and reads their results.
fn run_world(suite: &Suite, size: usize, transport: Transport) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let command = match transport {
        Transport::Usual => RANK,
        Transport::Network => RANK_OVER_NETWORK,
    };
    let mut job = Job::new(std::env::current_exe()?, size)
        .args([OsString::from(command), suite.name.into()])
        .env(FOLDER, folder.path())
        .console(Console::Silent);
    for (name, value) in accelerator::environment(folder.path(), size) {
        job = job.env(name, value);
    }
    // `trainyard` starts faster than this program, which links libtorch.
    if let Ok(trampoline) = programs::find("trainyard") {
        job = job.trampoline(trampoline);
    }
    let outcome = launch(&job)?;
    print!("{}", times(folder.path(), size));
    print!("{}", accelerator::synchronizations(folder.path()));
    let names: Vec<&str> = suite.cases.iter().map(|case| case.name).collect();
    let exits: Vec<String> = outcome
        .exits
        .iter()
        .map(|exit| format!("{}\n{}", exit.status, exit.stderr_tail.join("\n")))
        .collect();
    match failures(folder.path(), &names, &exits) {
        Some(text) => Err(text.into()),
        None if !outcome.is_success() => Err(outcome.report().unwrap_or_default().into()),
        None => match accelerator::hazards(folder.path(), size) {
            Some(text) => Err(text.into()),
            None => Ok(()),
        },
    }
}

/// Runs all cases on this rank, also after one has failed.
fn run_rank(suites: &[Suite], name: &str, transport: Transport) -> Outcome {
    let suite = suites
        .iter()
        .find(|suite| suite.name == name)
        .ok_or_else(|| format!("no suite {name:?}"))?;
    let folder = std::env::var_os(FOLDER).ok_or_else(|| format!("{FOLDER} is not set"))?;
    remember_panics();
    tch::set_num_threads(1);
    let rank = Rank::from_env(transport)?;
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
            notes: rank.take_notes(),
        })?;
        rank.end_case(failure.is_some())?;
    }
    Ok(rank.leave()?)
}

fn run_case(case: &Case, rank: &Rank) -> Result<(), String> {
    match panic::catch_unwind(AssertUnwindSafe(|| (case.run)(rank))) {
        Ok(outcome) => outcome.map_err(|error| error.to_string()),
        Err(_) => Err(LAST_PANIC
            .lock()
            .map_or_else(|p| p.into_inner().clone(), |text| text.clone())),
    }
}

/// The message of the last panic, with its location.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

fn remember_panics() {
    panic::set_hook(Box::new(|info| {
        // With `RUST_BACKTRACE=1` there is one.
        let backtrace = Backtrace::capture();
        let text = match backtrace.status() {
            BacktraceStatus::Captured => format!("{info}\n{backtrace}"),
            _ => info.to_string(),
        };
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
