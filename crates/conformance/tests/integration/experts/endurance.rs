//! A thousand steps with random routing and random stalls.
//!
//! Routers get new weights before every step, so that loads change from step to step, sometimes to all tokens at the same
//! few experts; and every rank stalls at random units. This would reveal all-to-alls that ranks start in different orders,
//! which deadlock, and memory that a step does not release.

use std::cell::RefCell;
use std::rc::Rc;
use std::thread::sleep;
use std::time::Duration;

use tch::Tensor;
use trainyard_config::Dtype;
use trainyard_conformance::training::{Session, divided};
use trainyard_conformance::{Outcome, Rank};
use trainyard_nn::{Parameter, UnitCall, UnitHooks};
use trainyard_parallel::DdpOptions;
use trainyard_torch::memory;
use trainyard_train::build;

use super::chance::Chance;
use super::job::{deepseek, laid_out};

const NUM_STEPS: u64 = 1000;

/// By this step all permanent memory has been allocated.
const SETTLED: usize = 10;

/// The communication thread may still hold the last few control values. A leak of eight bytes per step would be eight
/// times as large.
const SLACK: u64 = 1024;

/// Trains with random routing and stalls: no step hangs, and memory stays constant.
pub fn thousand_steps(rank: &Rank) -> Outcome {
    memory::observe();
    let mut config = laid_out(&deepseek(Dtype::Float32), 2, rank.size() as i64, 1, 0);
    config.training.global_batch_size = Some(8);
    config.training.steps = NUM_STEPS;
    let config = divided(&config, rank.size(), 2);
    let world = rank.join_config(&config)?;
    let options = DdpOptions {
        unit_hooks: vec![Rc::new(Stalling::new(rank.index()))],
        ..build::ddp_options(&config)
    };
    let mut session = Session::with_options(&config, &world, options)?;
    let (mut held, mut busiest) = (Vec::new(), 1.0f64);
    for step in 0..NUM_STEPS {
        reroute(session.trainer.parameters(), step)?;
        let outcome = session.step()?;
        let loss = session.trainer.global_loss(&outcome.local_loss)?;
        assert!(loss.is_finite(), "step {step}: loss {loss}");
        for load in session.trainer.expert_loads()? {
            busiest = busiest.max(load.imbalance());
        }
        drop(outcome);
        held.push(memory::report()?.total);
    }
    let settled = &held[SETTLED..];
    let (least, most) = settled.iter().fold((u64::MAX, 0), |(least, most), &bytes| {
        (least.min(bytes), most.max(bytes))
    });
    rank.note(format!(
        "{NUM_STEPS} steps; the busiest expert had up to {busiest:.1} equal loads; bytes held after step \
         {SETTLED} and every later one: {least} to {most}"
    ));
    assert!(most - least < SLACK, "bytes held after each step: {held:?}");
    Ok(())
}

/// New weights for every router, the same on all ranks: of random scale, or zero, in which case every token chooses the
/// first experts.
fn reroute(parameters: &[Parameter], step: u64) -> Result<(), tch::TchError> {
    let routers = parameters
        .iter()
        .filter(|p| p.name().ends_with("mlp.gate.weight"));
    for (index, router) in routers.enumerate() {
        let mut chance = Chance::new(1000 * step + index as u64);
        let size = [0.0, 0.02, 0.5, 20.0][chance.number() as usize % 4];
        let number = router.tensor().numel();
        let values: Vec<f32> = (0..number)
            .map(|_| (size * (chance.share() - 0.5)) as f32)
            .collect();
        tch::no_grad(|| {
            let values = Tensor::f_from_slice(&values)?.f_view_as(router.tensor())?;
            router.tensor().shallow_clone().f_copy_(&values)?;
            Ok::<_, tch::TchError>(())
        })?;
    }
    Ok(())
}

/// Stalls for up to four milliseconds before one unit in sixteen.
struct Stalling(RefCell<Chance>);

impl Stalling {
    fn new(rank: usize) -> Stalling {
        Stalling(RefCell::new(Chance::new(rank as u64)))
    }

    fn stall(&self) {
        let number = self.0.borrow_mut().number();
        if number.is_multiple_of(16) {
            sleep(Duration::from_micros((number >> 32) % 4000));
        }
    }
}

impl UnitHooks for Stalling {
    fn before_forward(&self, _call: &UnitCall) -> trainyard_nn::Result<()> {
        self.stall();
        Ok(())
    }

    fn before_backward(&self, _call: &UnitCall) -> trainyard_nn::Result<()> {
        self.stall();
        Ok(())
    }
}
