//! `trainyard schedule`: a pipeline's order of work, checked, timed and drawn.

mod measured;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use trainyard_schedule::{Costs, Kind, Schedule as Order, Timeline, simulate, to_svg};

use crate::failure::Failure;

/// Show a pipeline schedule: its bubble, what is in flight, and a picture of it
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard schedule --kind zb-h1 --stages 8 --microbatches 16 --svg out.svg\n  \
    trainyard schedule --kind interleaved --stages 8 --chunks 2 --microbatches 16\n  \
    trainyard schedule --csv order.csv --costs 1,1.2,0.8 --json\n  \
    trainyard schedule --trace outputs/profile_traces --svg both.svg")]
pub struct Schedule {
    /// Which: gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-v, dualpipe-v
    #[arg(long, default_value = "1f1b", value_parser = kind)]
    kind: Kind,
    /// Read the schedule from this file instead: a line per rank, as PyTorch writes them
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Stages of the model, over all ranks
    #[arg(long, default_value_t = 4)]
    stages: usize,
    /// Micro-batches of a step
    #[arg(long, default_value_t = 8)]
    microbatches: usize,
    /// Stages per rank; the schedule's own number if not given
    #[arg(long)]
    chunks: Option<usize>,
    /// What a stage takes: forward, backward for the input, backward for the weights
    #[arg(long, value_name = "F,I,W", default_value = "1,1,1", value_parser = costs)]
    costs: [f64; 3],
    /// Read steps of a pipeline from the traces in this folder, one per rank, and set them beside what
    /// the schedule predicts from the costs measured in them; in milliseconds
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["kind", "csv", "stages", "microbatches", "chunks", "costs"])]
    trace: Option<PathBuf>,
    /// Draw it into this SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn kind(name: &str) -> Result<Kind, String> {
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

impl Schedule {
    /// Makes or reads the schedule, and tells what it comes to.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        if let Some(folder) = &self.trace {
            return measured::execute(folder, self.svg.as_deref(), self.json);
        }
        let order = self.order()?;
        let [forward, input, weight] = self.costs;
        let timeline = simulate(&order, &Costs::uniform(forward, input, weight));
        let timeline = timeline.map_err(Failure::new)?;
        if let Some(path) = &self.svg {
            std::fs::write(path, to_svg(&[(&self.title(&order), &timeline)]))
                .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
        }
        match self.json {
            true => println!("{}", json(&order, &timeline)),
            false => self.print(&order, &timeline),
        }
        Ok(ExitCode::SUCCESS)
    }

    fn order(&self) -> Result<Order, Failure> {
        let order = match &self.csv {
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
                Order::from_csv(&text)
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
        let order = order.map_err(Failure::new)?;
        order.check().map_err(Failure::new)?;
        Ok(order)
    }

    fn title(&self, order: &Order) -> String {
        let name = match &self.csv {
            Some(path) => path.display().to_string(),
            None => self.kind.to_string(),
        };
        format!(
            "{name}: {} stages on {} ranks, {} micro-batches",
            order.num_stages(),
            order.num_ranks(),
            order.num_microbatches
        )
    }

    fn print(&self, order: &Order, timeline: &Timeline) {
        println!("{}\n", self.title(order));
        let share = 100.0 * timeline.bubble() / timeline.end().max(f64::MIN_POSITIVE);
        println!("complete, free of deadlock");
        println!("step     {:.4}", timeline.end());
        println!("bubble   {:.4} ({share:.1} %)", timeline.bubble());
        println!("\nrank       busy      waits  in flight");
        for (rank, most) in timeline.most_in_flight().into_iter().enumerate() {
            let (busy, waits) = (timeline.busy(rank), timeline.waits(rank));
            println!("{rank:<4} {busy:>10.4} {waits:>10.4} {most:>10}");
        }
    }
}

fn json(order: &Order, timeline: &Timeline) -> serde_json::Value {
    serde_json::json!({
        "num_ranks": order.num_ranks(),
        "num_stages": order.num_stages(),
        "num_microbatches": order.num_microbatches,
        "step": timeline.end(),
        "bubble": timeline.bubble(),
        "in_flight": timeline.most_in_flight(),
        "csv": order.to_csv(),
    })
}
