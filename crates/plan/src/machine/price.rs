//! The dry run of a strategy, in seconds.

use serde::{Deserialize, Serialize};
use trainyard_schedule::{Costs, Schedule, simulate};
use trainyard_trace::Calls;

use super::{Machine, MachineError};

/// What `trainyard dry-run --json` says of a rank, as far as it takes time.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct DryRun {
    /// Operators by name and size.
    pub operators: Vec<Calls>,
    /// Collectives by kind and purpose.
    pub collectives: Vec<Moved>,
}

/// Collectives of one kind and purpose.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Moved {
    /// Which collective.
    pub kind: String,
    /// How many.
    pub count: u64,
    /// Bytes this rank sends.
    pub sent_bytes: u64,
}

/// Seconds of a rank's step, by what they are spent on.
#[derive(Copy, Clone, Debug, Default, PartialEq, Serialize)]
pub struct Priced {
    /// Operators of layers, forward and backward.
    pub compute: f64,
    /// Operators of the optimiser.
    pub optimizer: f64,
    /// What the program does between operators.
    pub host: f64,
    /// Collectives. Ranks of a machine without accelerators compute them on the same cores, so nothing of
    /// them is hidden.
    pub communication: f64,
    /// Waiting for ranks that compute the same, but are slower at it by chance.
    pub waits: f64,
    /// Waiting for other stages.
    pub bubble: f64,
    /// The seconds among them that are guesses: of operators that were not measured.
    pub guessed: f64,
}

impl Priced {
    /// The step.
    pub const fn total(&self) -> f64 {
        self.busy() + self.bubble
    }

    const fn busy(&self) -> f64 {
        self.compute + self.optimizer + self.host + self.communication + self.waits
    }
}

/// What a rank's step takes, without waiting for other stages.
pub fn price(machine: &Machine, run: &DryRun) -> Priced {
    let mut priced = Priced::default();
    for calls in &run.operators {
        let seconds = match machine.operators.get(&calls.name) {
            Some(rate) => rate.seconds(calls),
            None => {
                let seconds = calls.count as f64 * machine.unseen.at(calls.elements as f64);
                priced.guessed += seconds;
                seconds
            }
        };
        match calls.name.contains("_fused_adam") || calls.name.contains("_foreach_") {
            true => priced.optimizer += seconds,
            false => priced.compute += seconds,
        }
        priced.host += calls.count as f64 * machine.between;
    }
    let each = run.collectives.iter();
    priced.communication = each.map(|moved| message(machine, moved)).sum();
    // Who sends waits for nobody.
    let met = run.collectives.iter().filter(|moved| moved.kind != "send");
    let num_meetings = met.map(|moved| moved.count).sum();
    priced.waits = machine.waits.at(num_meetings, priced.compute + priced.host);
    priced
}

/// A message between two ranks is counted where it is sent.
fn message(machine: &Machine, moved: &Moved) -> f64 {
    let kind = match moved.kind.as_str() {
        "send" => "send_recv",
        "recv" => return 0.0,
        kind => kind,
    };
    let Some(line) = machine.collectives.get(kind) else {
        return 0.0;
    };
    moved.count as f64 * line.each + moved.sent_bytes as f64 * line.per_unit
}

/// The slowest rank of a pipeline with the time it waits for others, as the schedule's simulation finds it.
/// `ranks` are those of the pipeline, first to last. Backward takes twice as long as forward, one half for
/// inputs and one for weights; `forwards` is how often forward runs: twice where it is computed again.
pub fn price_pipeline(
    machine: &Machine,
    schedule: &Schedule,
    ranks: &[DryRun],
    forwards: f64,
) -> Result<Priced, MachineError> {
    let each: Vec<Priced> = ranks.iter().map(|run| price(machine, run)).collect();
    let slowest = each.iter().max_by(|a, b| a.busy().total_cmp(&b.busy()));
    let Some(&slowest) = slowest else {
        return Err(MachineError::Empty("the list of stages"));
    };
    let num_parts = (schedule.num_stages() / ranks.len() * schedule.num_microbatches) as f64;
    let costs: Vec<(f64, f64, f64)> = (0..schedule.num_stages())
        .map(|stage| {
            let rank = &each[schedule.holders[stage].min(each.len() - 1)];
            let part = (rank.busy() - rank.optimizer) / num_parts / (2.0 + forwards);
            (part, forwards * part, part)
        })
        .collect();
    let end = simulate(schedule, &Costs::of_stages(&costs))?.end();
    let busy = slowest.busy() - slowest.optimizer;
    Ok(Priced {
        bubble: (end - busy).max(0.0),
        ..slowest
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use trainyard_schedule::Kind;

    use super::*;
    use crate::machine::line::Line;
    use crate::machine::meetings::Waits;
    use crate::machine::rates::Rate;

    fn machine() -> Machine {
        let line = |each, per_unit| Line { each, per_unit };
        let over_flops = true;
        let mm = Rate {
            over_flops,
            line: line(1e-6, 1e-9),
            seen: Vec::new(),
        };
        Machine {
            num_ranks: 2,
            operators: BTreeMap::from([("aten::mm".to_owned(), mm)]),
            collectives: BTreeMap::from([
                ("all_reduce".to_owned(), line(1e-4, 1e-9)),
                ("send_recv".to_owned(), line(1e-5, 1e-9)),
            ]),
            waits: Waits {
                share: 0.1,
                after: 1.0,
            },
            between: 1e-6,
            unseen: line(2e-6, 1e-9),
        }
    }

    fn run(kinds: &[&str]) -> DryRun {
        let calls = |name: &str, flops| Calls {
            name: name.to_owned(),
            flops,
            elements: 1000,
            count: 10,
            self_ns: 0,
        };
        let moved = |kind: &str| Moved {
            kind: kind.to_owned(),
            count: 2,
            sent_bytes: 1_000_000,
        };
        DryRun {
            operators: vec![calls("aten::mm", 1_000_000), calls("aten::new", 0)],
            collectives: kinds.iter().map(|&kind| moved(kind)).collect(),
        }
    }

    #[test]
    fn every_call_and_byte_has_its_price() {
        let priced = price(&machine(), &run(&["all_reduce"]));
        assert!((priced.compute - (10.0 * 1.001e-3 + 10.0 * 3e-6)).abs() < 1e-9);
        assert!((priced.guessed - 10.0 * 3e-6).abs() < 1e-12);
        assert!((priced.host - 20e-6).abs() < 1e-12);
        assert!((priced.communication - 1.2e-3).abs() < 1e-12);
        assert!((priced.waits - 0.1 * (priced.compute + priced.host)).abs() < 1e-12);
        assert_eq!(price(&machine(), &run(&["recv"])).communication, 0.0);
        assert_eq!(price(&machine(), &run(&["send"])).waits, 0.0);
    }

    #[test]
    fn a_pipeline_of_equal_stages_waits_as_the_schedule_says() {
        let schedule = Kind::OneForwardOneBackward.build(2, 8, 1).unwrap();
        let ranks = [run(&["send", "recv"]), run(&["send", "recv"])];
        let priced = price_pipeline(&machine(), &schedule, &ranks, 1.0).unwrap();
        let share = priced.bubble / priced.total();
        assert!((0.08..0.14).contains(&share), "{share}");
    }
}
