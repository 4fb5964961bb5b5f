//! What a pipeline overlaps, read from the ledger.

use std::error::Error;
use std::time::Duration;

use trainyard_config::Config;
use trainyard_conformance::training::{Session, divided};
use trainyard_conformance::{Outcome, Rank};
use trainyard_trace::{Events, Ledger, Purpose, Span, SpanKind};

use super::equality::{SequenceParallel, num_data_ranks, tensor_parallel};
use super::pipeline::{deep, piped};

const NUM_STEPS: usize = 2;

/// If a rank has two stages, the gradients of the one that ends first are reduced while the other one computes.
pub fn reduction_during_cooldown(rank: &Rank) -> Outcome {
    let config = piped(&deep(trainyard_config::Dtype::Float32), 2, "interleaved");
    let events = observe(rank, &config)?;
    for step in events.spans.iter().filter(|s| s.kind == SpanKind::Step) {
        let within = |ns: u64| (step.started_ns..step.ended_ns).contains(&ns);
        let tasks = spans(&events, "backward ").filter(|span| within(span.started_ns));
        let last = tasks
            .map(|span| span.started_ns)
            .max()
            .ok_or("no backward")?;
        let mut gradients = events
            .collectives
            .iter()
            .filter(|c| c.purpose == Purpose::Gradient && within(c.issued_ns));
        assert!(
            gradients.any(|c| c.issued_ns < last),
            "nothing travels early"
        );
    }
    Ok(())
}

/// In a forward-backward pair, one starts its collectives while those of the other are pending.
pub fn pairs_communicate_in_turn(rank: &Rank) -> Outcome {
    let config = piped(&deep(trainyard_config::Dtype::Float32), 2, "dualpipe-v");
    let events = observe(
        rank,
        &tensor_parallel(&config, 2, SequenceParallel::Disabled),
    )?;
    let mut num_pairs = 0;
    for pair in spans(&events, "overlap ") {
        num_pairs += 1;
        let of_layers = events.collectives.iter().filter(|c| {
            c.purpose == Purpose::Activation
                && (pair.started_ns..pair.ended_ns).contains(&c.issued_ns)
        });
        let of_layers: Vec<_> = of_layers.collect();
        let meanwhile = |issued_ns: u64, waited_ns: u64| {
            let mut others = of_layers.iter();
            others.any(|c| issued_ns < c.issued_ns && c.issued_ns < waited_ns)
        };
        let mut first = of_layers.iter();
        let is_shared = first.any(|c| {
            c.waited
                .is_some_and(|(began, _)| meanwhile(c.issued_ns, began))
        });
        assert!(is_shared, "{} came one after the other", pair.name);
    }
    assert!(num_pairs > 0, "no pairs");
    Ok(())
}

fn spans<'a>(events: &'a Events, prefix: &'a str) -> impl Iterator<Item = &'a Span> {
    let spans = events.spans.iter();
    spans.filter(move |span| span.name.starts_with(prefix))
}

fn observe(rank: &Rank, config: &Config) -> Result<Events, Box<dyn Error>> {
    let config = divided(config, num_data_ranks(rank, config)?, 4);
    let ledger = Ledger::recording(rank.index());
    let mesh = config.mesh(rank.size())?;
    let world = rank.join(mesh, ledger.clone(), Duration::from_secs(60))?;
    let mut session = Session::new(&config, &world)?;
    for _ in 0..NUM_STEPS {
        session.step()?;
    }
    session.trainer.wait_pending()?;
    Ok(ledger.events())
}
