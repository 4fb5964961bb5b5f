//! `trainyard schedule`: pipeline schedules, validated, simulated and drawn.

mod measured;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use trainyard_schedule::{Costs, Schedule, ScheduleKind, Timeline, simulate, to_svg};
use trainyard_trace::counted;

use crate::failure::Failure;

/// Simulate a pipeline schedule: its bubble, micro-batches in flight, and a picture
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard schedule --kind zb-h1 --stages 8 --microbatches 16 --svg out.svg\n  \
    trainyard schedule --kind interleaved --stages 8 --chunks 2 --microbatches 16\n  \
    trainyard schedule --csv schedule.csv --costs 1,1.2,0.8 --json\n  \
    trainyard schedule --trace outputs/profile_traces --svg both.svg")]
pub struct ScheduleArgs {
    #[arg(long, default_value = "1f1b", value_parser = kind, help = kinds())]
    kind: ScheduleKind,
    /// Read the schedule from a CSV file in PyTorch's format
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Number of stages over all ranks
    #[arg(long, default_value_t = 4)]
    stages: usize,
    /// Micro-batches per step
    #[arg(long, default_value_t = 8)]
    microbatches: usize,
    /// Stages per rank; by default that of the schedule
    #[arg(long)]
    chunks: Option<usize>,
    /// Costs of a stage: forward, backward for the input, backward for the weights
    #[arg(long, value_name = "F,I,W", default_value = "1,1,1", value_parser = costs)]
    costs: [f64; 3],
    /// Read pipeline steps from the traces in this directory, one per rank, and compare them with the
    /// prediction from the measured costs; in milliseconds
    #[arg(long, value_name = "DIR", conflicts_with_all = ["kind", "csv", "stages", "microbatches", "chunks", "costs"])]
    trace: Option<PathBuf>,
    /// Draw the schedule into this SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The help of `--kind`.
fn kinds() -> String {
    let names = ScheduleKind::ALL.map(ScheduleKind::name);
    format!("The schedule: {}", names.join(", "))
}

fn kind(name: &str) -> Result<ScheduleKind, String> {
    name.parse().map_err(|error| format!("{error}"))
}

fn costs(text: &str) -> Result<[f64; 3], String> {
    let numbers: Result<Vec<f64>, _> = text.split(',').map(|n| n.trim().parse()).collect();
    let numbers = numbers.ok().and_then(|numbers| numbers.try_into().ok());
    let good = |numbers: &[f64; 3]| numbers.iter().all(|n| n.is_finite() && *n >= 0.0);
    numbers
        .filter(good)
        .ok_or_else(|| format!("{text:?}: write three numbers, as in 1,1,1"))
}

impl ScheduleArgs {
    /// Builds or reads the schedule, and prints its simulation.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        if let Some(folder) = &self.trace {
            return measured::execute(folder, self.svg.as_deref(), self.json);
        }
        let schedule = self.schedule()?;
        let [forward, input, weight] = self.costs;
        let timeline = simulate(&schedule, &Costs::uniform(forward, input, weight));
        let timeline = timeline.map_err(Failure::new)?;
        if let Some(path) = &self.svg {
            std::fs::write(path, to_svg(&[(&self.title(&schedule), &timeline)]))
                .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
        }
        if self.json {
            println!("{}", json(&schedule, &timeline))
        } else {
            self.print(&schedule, &timeline)
        }
        Ok(ExitCode::SUCCESS)
    }

    fn schedule(&self) -> Result<Schedule, Failure> {
        let schedule = match &self.csv {
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
                Schedule::from_csv(&text)
            }
            None => {
                let chunks = self.chunks.or(self.kind.num_chunks()).unwrap_or(2);
                if chunks == 0 || !self.stages.is_multiple_of(chunks) {
                    let remedy = format!("use a multiple of {chunks}");
                    let problem = format!("{} stages with {chunks} per rank", self.stages);
                    return Err(Failure::new(problem).hint(remedy));
                }
                self.kind
                    .build(self.stages / chunks, self.microbatches, chunks)
            }
        };
        let schedule = schedule.map_err(Failure::new)?;
        schedule.check().map_err(Failure::new)?;
        Ok(schedule)
    }

    fn title(&self, schedule: &Schedule) -> String {
        let name = match &self.csv {
            Some(path) => path.display().to_string(),
            None => self.kind.to_string(),
        };
        format!(
            "{name}: {} on {}, {}",
            counted(schedule.num_stages() as u64, "stage"),
            counted(schedule.num_ranks() as u64, "rank"),
            counted(schedule.num_microbatches as u64, "micro-batch")
        )
    }

    fn print(&self, schedule: &Schedule, timeline: &Timeline) {
        println!("{}\n", self.title(schedule));
        let share = 100.0 * timeline.bubble() / timeline.end().max(f64::MIN_POSITIVE);
        println!("complete, free of deadlock");
        println!("step     {:.4}", timeline.end());
        println!("bubble   {:.4} ({share:.1} %)", timeline.bubble());
        println!("\nrank       busy      waits  in flight");
        for (rank, most) in timeline.max_in_flight().into_iter().enumerate() {
            let (busy, waits) = (timeline.busy_time(rank), timeline.idle_time(rank));
            println!("{rank:<4} {busy:>10.4} {waits:>10.4} {most:>10}");
        }
    }
}

fn json(schedule: &Schedule, timeline: &Timeline) -> serde_json::Value {
    serde_json::json!({
        "num_ranks": schedule.num_ranks(),
        "num_stages": schedule.num_stages(),
        "num_microbatches": schedule.num_microbatches,
        "step": timeline.end(),
        "bubble": timeline.bubble(),
        "in_flight": timeline.max_in_flight(),
        "csv": schedule.to_csv(),
    })
}
