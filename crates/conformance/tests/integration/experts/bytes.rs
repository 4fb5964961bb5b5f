//! Bytes of expert parallelism, counted by the ledger and by the kernel.

use trainyard_config::{Config, Dtype};
use trainyard_conformance::training::{Session, divided};
use trainyard_conformance::{Outcome, Rank};
use trainyard_trace::{CollectiveKind, Purpose};
use trainyard_train::{ExpertLoad, data_axes};

use super::job::{job, laid_out};

/// In a step every row is sent four times: to its expert and back, and its gradients. Rows that stay on their rank are not
/// sent.
pub fn tokens(rank: &Rank) -> Outcome {
    let size = rank.size() as i64;
    for (skew, num_microbatches) in [(0.0, 1), (0.05, 2), (1e3, 1)] {
        let mut config = laid_out(&job(Dtype::Float32), size, size, 1, 0);
        config.debug.routing_skew = skew;
        count(
            rank,
            &divided(&config, rank.size(), num_microbatches),
            num_microbatches,
        )?;
    }
    Ok(())
}

/// If each rank is its own node, every token sends one row to each node with some of its experts: at most one row per
/// token, node and direction, and fewer than without the hierarchy.
pub fn machines(rank: &Rank) -> Outcome {
    let size = rank.size() as i64;
    let sent = |length: usize| -> Result<u64, Box<dyn std::error::Error>> {
        let mut config = laid_out(&job(Dtype::Float32), size, size, 1, 0);
        config.model.moe.get_or_insert_default().num_experts_per_tok = Some(4);
        config.parallelism.expert_parallel_local_degree = length;
        let config = divided(&config, rank.size(), 1);
        let world = rank.join_config(&config)?;
        let mut session = Session::new(&config, &world)?;
        let before = world.ledger().totals();
        session.step()?;
        let totals = world.ledger().totals() - before;
        let sent = totals.of_purpose(Purpose::Combine).sent_bytes;
        Ok(rank.all_gather(&sent)?.iter().sum())
    };
    let (flat, once) = (sent(0)?, sent(1)?);
    // Forward and backward of two layers; with the gradient of each row goes that of its weights.
    let most = 2 * 24 * 32 * (rank.size() as u64 - 1) * (64 + 64 + 4) * 4;
    rank.note(format!(
        "bytes back from experts: {flat}, by machines {once}, at most {most}"
    ));
    assert!(once <= most && once < flat);
    Ok(())
}

fn count(rank: &Rank, config: &Config, num_microbatches: usize) -> Outcome {
    let world = rank.join_config(config)?;
    let mut session = Session::new(config, &world)?;
    let before = world.ledger().totals();
    session.step()?;
    let totals = world.ledger().totals() - before;
    let of = |purpose| {
        let found = totals.collectives.get(&(CollectiveKind::AllToAll, purpose));
        found.map_or((0, 0, 0), |t| (t.count, t.payload_bytes, t.sent_bytes))
    };
    let (width, num_layers) = (64 * 4, 2);
    let there = of(Purpose::Dispatch);
    let back = of(Purpose::Combine);
    let (count, payload, sent) = (there.0 + back.0, there.1 + back.1, there.2 + back.2);
    assert_eq!(there.0, back.0);
    // Dispatch and combine in forward and in backward, for two layers; one exchange of counts.
    let passes = num_layers * num_microbatches as u64;
    assert_eq!(count, 4 * passes);
    assert_eq!(of(Purpose::Control).0, passes);

    // Every rank dispatches its own rows and returns those it computed; gradients go the other way.
    let own = own_rows(&session, rank)?;
    let mine = rank.index();
    let rows_sent: u64 = (0..rank.size())
        .filter(|&to| to != mine)
        .map(|to| own[to])
        .sum();
    let all = rank.all_gather(&own)?;
    let from_others = all.iter().enumerate().filter(|(from, _)| *from != mine);
    let rows_returned: u64 = from_others.map(|(_, own)| own[mine]).sum();
    assert_eq!(sent, 2 * width * (rows_sent + rows_returned));
    let rows_here: u64 = own.iter().sum();
    let rows_computed: u64 = all.iter().map(|own| own[mine]).sum();
    assert_eq!(payload, 2 * width * (rows_here + rows_computed));

    // Over all ranks: k · tokens · hidden, times the share that leaves its rank, four times per layer.
    let all_sent: u64 = rank.all_gather(&sent)?.iter().sum();
    let elsewhere: u64 = rank.all_gather(&rows_sent)?.iter().sum();
    assert_eq!(all_sent, 4 * width * elsewhere);
    let num_rows: u64 = rank.all_gather(&rows_here)?.iter().sum();
    assert_eq!(num_rows, 2 * 24 * 32 * num_layers);
    Ok(())
}

/// The number of rows that this rank sends to each rank, over all layers of a step.
fn own_rows(session: &Session, rank: &Rank) -> Result<Vec<u64>, Box<dyn std::error::Error>> {
    let mut rows = vec![0; rank.size()];
    for unit in session.trainer.model().units() {
        let Some(router) = unit.router() else {
            continue;
        };
        let load = router.load().step_counts()?.ok_or("no step was taken")?;
        let load = Vec::<i64>::try_from(load)?;
        for (expert, count) in load.iter().enumerate() {
            rows[expert * rank.size() / load.len()] += *count as u64;
        }
    }
    // The reported loads are the sum over all ranks.
    let reported: Vec<ExpertLoad> = session.trainer.expert_loads()?;
    let all: u64 = rank.all_gather(&rows)?.iter().flatten().sum();
    let reported = reported.iter().flat_map(|load| &load.rows).sum::<i64>();
    assert_eq!(reported as u64, all);
    Ok(rows)
}

/// Gradients and parameters by closed form, and the sum by the counters of the kernel.
pub fn states(rank: &Rank) -> Outcome {
    let size = rank.size() as i64;
    let config = job(Dtype::Float32);
    for (ep, stage) in [(size, 0), (2, 0), (2, 1), (2, 2), (2, 3), (1, 3)] {
        let config = laid_out(&config, ep, size, 1, stage);
        let num_data_ranks = config.mesh(rank.size())?.size_of(data_axes());
        let mut config = divided(&config, num_data_ranks, 2);
        config.training.steps = 2;
        let run = trainyard_conformance::training::train_on(rank, &config)?;
        run.assert_bytes(rank, 0, &format!("{:?}", config.parallelism))?;
    }
    Ok(())
}
