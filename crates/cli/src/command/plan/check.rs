//! `trainyard plan check`: what somebody else's config comes to.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use trainyard_plan::framework::Told;
use trainyard_plan::report::{Report, in_words, term};
use trainyard_plan::{Calibration, Framework, Held, Plan, Question, Shape};

use super::question::{cluster, question};
use super::{framework, read};
use crate::failure::Failure;

/// Say whether a framework's config fits, how long its step takes, and what would be faster
///
/// Reads Megatron's arguments, torchtitan's TOML or command line, DeepSpeed's JSON and our own TOML.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard plan check configs/llama3-70b.toml --cluster 64xH100\n  \
    trainyard plan check pretrain.sh --cluster 64xH100\n  \
    trainyard plan check ds_config.json --framework deepspeed --model config.json --cluster 16xA100 --seq-len 4096")]
pub(super) struct Check {
    /// The config file or script
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The machines: as in 64xH100, or a cluster TOML
    #[arg(long, value_name = "CLUSTER")]
    cluster: String,
    /// The model, where the file does not have it: a config TOML, a config.json, or a folder with one
    #[arg(long, value_name = "MODEL")]
    model: Option<PathBuf>,
    /// Tokens of a sample, where the file does not say
    #[arg(long, value_name = "S")]
    seq_len: Option<usize>,
    /// What it is for, where it cannot be told: trainyard, torchtitan, torchtitan-flags, megatron, deepspeed
    #[arg(long, value_name = "FRAMEWORK", value_parser = framework)]
    framework: Option<Framework>,
}

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

impl Check {
    /// Reads, prices, searches and tells. Exits with 1 where it does not fit.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let text = read(&self.file)?;
        let cluster = cluster(&self.cluster)?;
        let framework = self.framework.or_else(|| Framework::detect(&text));
        let framework = framework.ok_or_else(|| {
            Failure::new(format!("{}: no framework's config", self.file.display()))
                .hint("say whose it is with --framework")
        })?;
        let told = Told {
            world: Some(cluster.world_size()),
            seq_len: self.seq_len,
        };
        let found = framework.read_with(&text, &told).map_err(Failure::new)?;
        let shape = match &self.model {
            Some(path) => Some(Shape::load(path).map_err(Failure::new)?),
            None => found.shape,
        };
        let shape = shape.ok_or_else(|| {
            Failure::new("the file does not say which model it is for")
                .hint("name one with --model")
        })?;
        let strategy = found.strategy;
        let (needed, there) = (strategy.degrees.world_size(), cluster.world_size());
        if needed != there {
            return Err(Failure::new(format!(
                "its degrees multiply to {needed} ranks, not {there}"
            ))
            .hint(format!("use a cluster of {needed}, or change a degree")));
        }
        let (batch, seq_len) = (strategy.global_batch, strategy.seq_len);
        let held = Held::same(strategy.precision);
        let mut question = question(shape, cluster, batch, seq_len, held);
        question.calibration = Calibration::of_cluster(&question.cluster, found.software);
        let plan = question.price(&strategy).map_err(Failure::new)?;
        println!("{framework}: {}", in_words(&plan));
        println!("taken to run with {}\n", found.software);
        let fits = print(&question, &plan);
        beside(question, plan);
        Ok(if fits {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

/// Bytes and seconds, and whether it fits.
fn print(question: &Question, plan: &Plan) -> bool {
    let missing = question.missing(plan);
    for memory in question.memories(&plan.strategy) {
        let total = memory.total() / GIB;
        println!("{:<14} {total:>8.1} GiB", memory.class.name());
    }
    match missing > 0.0 {
        true => println!("does not fit: {:.1} GiB are missing", missing / GIB),
        false => println!("fits, with {:.1} GiB to spare", -missing / GIB),
    }
    let time = &plan.time;
    println!(
        "\nstep {:.3} s ({:.3} to {:.3})",
        time.likely, time.low, time.high
    );
    let terms = time
        .terms()
        .into_iter()
        .filter(|(_, seconds)| *seconds > 0.0);
    for (name, seconds) in terms {
        let share = 100.0 * seconds / time.likely;
        println!("  {seconds:>9.3} s {share:>5.1} %  {}", term(name));
    }
    missing <= 0.0
}

/// What the planner would do instead.
fn beside(question: Question, plan: Plan) {
    let mut report = Report::of(question);
    report.compare(plan.clone());
    let Some(best) = report.best() else {
        for sentence in report.sentences() {
            println!("\n{sentence}");
        }
        return;
    };
    let gain = plan.time.likely / best.time.likely - 1.0;
    let fits = report.question.missing(&plan) <= 0.0;
    if fits && gain < 0.01 {
        println!("\nThe planner finds nothing that is more than 1 % faster.");
        return;
    }
    let gained = match fits {
        true => format!("{:+.1} % tokens per second", 100.0 * gain),
        false => "which fits".to_owned(),
    };
    println!(
        "\nThe planner would take {}: {:.3} s, {:.1} GiB, {gained}.",
        in_words(best),
        best.time.likely,
        best.memory.total() / GIB
    );
    let terms = report
        .compared
        .iter()
        .flat_map(|compared| &compared.lost.terms);
    for (name, seconds) in terms.take(4) {
        println!("  {:>+9.3} s  {}", -seconds, term(name));
    }
}
