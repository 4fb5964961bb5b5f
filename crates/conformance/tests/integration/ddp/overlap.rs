//! When reductions begin: during backward, or after it.

use std::error::Error;
use std::sync::{Arc, Mutex};

use trainyard_config::Dtype;
use trainyard_conformance::training::{Session, debug_llama, divided};
use trainyard_conformance::{Outcome, Rank};
use trainyard_torch::TorchError;
use trainyard_torch::autograd::tensor_hook;
use trainyard_trace::{Collective, Ledger, Purpose, Span, SpanKind};

const NUM_STEPS: usize = 10;

/// One step as recorded by the ledger and a hook.
struct Step {
    reductions: Vec<Collective>,
    backward: Span,
    /// When backward had computed its last gradient, that of the embedding.
    computed_ns: u64,
}

pub fn early(rank: &Rank) -> Outcome {
    let steps = observe(rank, true)?;
    for step in &steps {
        let num_reductions = step.reductions.len();
        assert!(num_reductions >= 4, "only {num_reductions} buckets");
        // All buckets but the one that the last gradient completes.
        let early = step
            .reductions
            .iter()
            .filter(|r| r.issued_ns < step.computed_ns);
        assert_eq!(early.count(), num_reductions - 1);
        let first = &step.reductions[0];
        assert!(
            step.backward.started_ns <= first.started_ns,
            "before backward"
        );
    }
    Ok(())
}

pub fn late(rank: &Rank) -> Outcome {
    for step in observe(rank, false)? {
        assert!(
            step.reductions
                .iter()
                .all(|r| r.issued_ns > step.computed_ns)
        );
        assert!(
            step.reductions
                .iter()
                .all(|r| r.ended_ns <= step.backward.ended_ns)
        );
    }
    Ok(())
}

fn observe(rank: &Rank, overlap: bool) -> Result<Vec<Step>, Box<dyn Error>> {
    let ledger = Ledger::recording(rank.index());
    let world = rank.world_with(ledger.clone())?;
    let mut config = divided(&debug_llama(Dtype::Float32), rank.size(), 1);
    config.parallelism.overlap = overlap;
    config.parallelism.first_bucket_mb = 0.02;
    config.parallelism.bucket_cap_mb = 0.05;
    let mut session = Session::new(&config, &world)?;
    let computed = Arc::new(Mutex::new(Vec::new()));
    let parameters = session.trainer.parameters();
    let embedding = parameters
        .iter()
        .find(|p| p.name() == "model.embed_tokens.weight")
        .ok_or("no embedding")?;
    // A hook on the gradient before it is accumulated; the strategy sees it right after.
    let (times, clock) = (Arc::clone(&computed), ledger.clone());
    let _hook = tensor_hook(embedding.tensor(), move |_| {
        times
            .lock()
            .map_err(|_| TorchError::Other("poisoned".into()))?
            .push(clock.now_ns());
        Ok(None)
    })?;
    for _ in 0..NUM_STEPS {
        session.step()?;
    }
    let computed = computed.lock().map_err(|_| "poisoned")?.clone();
    assert_eq!(computed.len(), NUM_STEPS);
    let events = ledger.events();
    let spans = events
        .spans
        .into_iter()
        .filter(|span| span.kind == SpanKind::Backward);
    let gradients = events
        .collectives
        .iter()
        .filter(|c| c.purpose == Purpose::Gradient);
    let gradients: Vec<&Collective> = gradients.collect();
    let of_span = |(backward, computed_ns): (Span, u64)| Step {
        reductions: gradients
            .iter()
            .filter(|c| (backward.started_ns..backward.ended_ns).contains(&c.issued_ns))
            .map(|c| (*c).clone())
            .collect(),
        backward,
        computed_ns,
    };
    let steps: Vec<Step> = spans.zip(computed).map(of_span).collect();
    assert_eq!(
        steps.iter().map(|s| s.reductions.len()).sum::<usize>(),
        gradients.len()
    );
    Ok(steps)
}
