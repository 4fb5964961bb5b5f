//! Dry runs of experts: without tokens, the loads follow a given skew.

use trainyard_config::{Config, Dtype};
use trainyard_conformance::training::{Session, divided, on_rank_0};
use trainyard_conformance::{Outcome, Rank, programs};
use trainyard_trace::{CollectiveKind, Purpose};
use trainyard_train::dry_run::{DryRun, dry_run};

use super::job::{deepseek, laid_out};

fn carries_rows(purpose: Purpose) -> bool {
    matches!(purpose, Purpose::Dispatch | Purpose::Combine)
}

/// The number and bytes of the all-to-alls that send rows.
fn tokens(run: &DryRun) -> (u64, u64) {
    let is_it = |kind, purpose| kind == CollectiveKind::AllToAll && carries_rows(purpose);
    let rows = run
        .collectives
        .iter()
        .filter(|row| is_it(row.kind, row.purpose));
    rows.fold((0, 0), |(count, sent), row| {
        (count + row.count, sent + row.sent_bytes)
    })
}

/// Apart from the rows, what a real run sends does not depend on the routing, and neither does the number of collectives.
pub fn equals_a_real_run(rank: &Rank) -> Outcome {
    for stage in [0, 1, 3] {
        let mut config = laid_out(&deepseek(Dtype::Float32), 2, 2, 1, stage);
        // So much skew that the first expert gets all tokens.
        config.debug.routing_skew = 1e5;
        config.model.moe.get_or_insert_default().num_experts_per_tok = Some(1);
        let config = divided(&config, rank.size(), 2);
        let world = rank.join_config(&config)?;
        let mut session = Session::new(&config, &world)?;
        session.step()?;
        session.trainer.wait_pending()?;
        let before = world.ledger().totals();
        session.step()?;
        session.trainer.wait_pending()?;
        let totals = world.ledger().totals() - before;
        // A dry run counts all memory of this process.
        drop(session);
        let dry = dry_run(&(&config).into(), rank.size(), rank.index())?;
        for row in &dry.collectives {
            let real = totals.collectives.get(&(row.kind, row.purpose));
            let real = real.map_or((0, 0), |total| (total.count, total.payload_bytes));
            // A dry run assumes that all ranks are like this one, so it knows less about what arrives.
            let is_known = !carries_rows(row.purpose);
            if is_known {
                assert_eq!(
                    real,
                    (row.count, row.payload_bytes),
                    "{:?} {:?}",
                    row.kind,
                    row.purpose
                );
            } else {
                assert_eq!(real.0, row.count);
            }
        }
        assert_eq!(dry.states, dry.states_by_formula, "stage {stage}");
    }
    Ok(())
}

/// With equal loads, one of 64 ranks sends 63 of 64 of its rows: 8 per token, in dispatch and combine, forward and
/// backward, and once more where forward is recomputed.
pub fn large(rank: &Rank) -> Outcome {
    on_rank_0(rank, || -> Result<(), Box<dyn std::error::Error>> {
        let path = programs::repository("configs/deepseek-v3.toml");
        let assets = programs::repository("configs/deepseek-v3");
        let assets = format!("--model.hf_assets_path={}", assets.display());
        let config = Config::load(path.clone(), std::slice::from_ref(&assets))?;
        // A rank of the ninth of sixteen stages.
        let run = dry_run(&(&config).into(), 2048, 1024)?;
        assert_eq!(run.mesh, "pp16 x dp_shard128 (ep64)");
        println!(
            "671B: {} parameters, peak {}",
            run.num_parameters, run.peak_bytes
        );
        let (count, sent) = tokens(&run);
        let (num_microbatches, each) = (32, 8 * 4096 / 64 * 63 * 7168 * 2);
        assert!(count > 0 && count.is_multiple_of(6 * num_microbatches));
        assert_eq!(sent, count * each);
        assert_eq!(run.states, run.states_by_formula);

        let skewed = ["--debug.routing_skew=0.5".to_owned(), assets];
        let skewed = Config::load(path, &skewed)?;
        let skewed = dry_run(&(&skewed).into(), 2048, 1024)?;
        // The first rank of a stage has the busiest experts.
        assert_eq!(tokens(&skewed).0, count);
        assert!(skewed.peak_bytes > run.peak_bytes);
        Ok(())
    })?;
    Ok(())
}
