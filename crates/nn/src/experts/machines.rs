//! Exchange in two steps, for experts on several machines.
//!
//! Links inside a machine are faster than those between machines. So a token goes to a machine once,
//! however many of its experts are there, to the rank that stands where its own does; that rank hands it to
//! the ranks with its experts. On the way back it adds up, with their weights, what those computed, and one
//! sum goes back. Of `k` experts per token, spread over `m` machines, `m (1 - (1 - 1/m)^k)` rows travel
//! between machines instead of `k`, in each direction.

use tch::{Kind, Tensor};
use trainyard_torch::{Group, meta};

use super::exchange::{Exchange, Returning};
use super::route::Route;
use super::router::{Choice, Destinations};
use crate::Result;

/// The machines that share the experts of a layer, as one rank sees them. Cloning shares them.
#[derive(Clone)]
pub(super) struct Machines {
    within: Option<Group>,
    across: Group,
}

/// Tokens that have come to this machine.
pub(super) struct Arrived {
    /// [tokens, width].
    pub rows: Tensor,
    /// Which of this machine's experts they go to.
    pub to: Destinations,
    /// [tokens, chosen]; those of experts on other machines too, which meet nothing here.
    pub weights: Tensor,
    route: Route,
    exchange: Exchange,
}

impl Machines {
    pub(super) fn new(within: &Group, across: &Group) -> Machines {
        Machines {
            within: (within.size() > 1).then(|| within.clone()),
            across: across.clone(),
        }
    }

    /// The ranks of this machine, where there are several.
    pub(super) fn within(&self) -> Option<&Group> {
        self.within.as_ref()
    }

    /// Sends tokens to the machines that have their experts, and receives others.
    pub(super) fn dispatch(&self, rows: &Tensor, choice: &Choice) -> Result<Arrived> {
        let machines = self.destinations(&choice.to)?;
        let route = Route::new(&machines)?;
        let exchange = Exchange::new(Some(&self.across), &route.counts, rows)?;
        let weights = exchange.dispatch(&route.sorted(&choice.weights)?)?;
        let numbers = tch::no_grad(|| exchange.accompany(&route.picked(&choice.to.numbers)?))?;
        Ok(Arrived {
            rows: exchange.dispatch(&route.sorted(rows)?)?,
            to: self.here(&choice.to, numbers)?,
            weights,
            route,
            exchange,
        })
    }

    /// Which machines tokens go to, each once.
    fn destinations(&self, to: &Destinations) -> Result<Destinations> {
        let number = self.across.size();
        let each = to.number / number;
        if meta::is_meta(&to.numbers) {
            let (num_tokens, chosen) = to.numbers.size2()?;
            return Ok(Destinations {
                numbers: to.numbers.shallow_clone(),
                number,
                drops: true,
                expected: expected_tokens(&to.expected, number, num_tokens, chosen),
            });
        }
        tch::no_grad(|| {
            // What goes to no expert goes to no machine.
            let machine = to.numbers.f_floor_divide_scalar(each as i64)?;
            let same = machine
                .f_unsqueeze(2)?
                .f_eq_tensor(&machine.f_unsqueeze(1)?)?;
            let is_repeated = same
                .f_to_kind(Kind::Uint8)?
                .f_tril(-1)?
                .f_amax(2i64, false)?;
            let is_repeated = is_repeated.f_to_kind(Kind::Bool)?;
            Ok(Destinations {
                numbers: machine.f_masked_fill(&is_repeated, number as i64)?,
                number,
                drops: true,
                expected: Vec::new(),
            })
        })
    }

    /// Which of this machine's experts the tokens that came go to, of all experts' `numbers`.
    fn here(&self, to: &Destinations, numbers: Tensor) -> Result<Destinations> {
        let number = to.number / self.across.size();
        let first = self.across.index() * number;
        let (numbers, expected) = match meta::is_meta(&numbers) {
            // Every rank that sends is taken to be like this one.
            true => {
                let own = to.expected[first..first + number].iter();
                (
                    numbers,
                    own.map(|rows| rows * self.across.size() as i64).collect(),
                )
            }
            false => tch::no_grad(|| {
                let own = numbers.f_sub_scalar(first as i64)?;
                let is_elsewhere = own.f_lt(0)?.f_logical_or(&own.f_ge(number as i64)?)?;
                let own = own.f_masked_fill(&is_elsewhere, number as i64)?;
                Ok::<_, tch::TchError>((own, Vec::new()))
            })?,
        };
        Ok(Destinations {
            numbers,
            number,
            drops: true,
            expected,
        })
    }
}

impl Arrived {
    /// The way back of what this machine's experts make of the tokens that came, begun.
    pub(super) fn start_combine(&self, sums: &Tensor) -> Result<Returning> {
        self.exchange.start_combine(sums)
    }

    /// For each of this rank's own tokens the sum of what came back from machines.
    pub(super) fn combined(&self, returned: &Tensor) -> Result<Tensor> {
        self.route.summed(returned)
    }
}

/// Of `num_tokens` that choose `chosen` experts each, how many go to every machine, if experts get rows as
/// expected and choices do not depend on each other.
fn expected_tokens(rows: &[i64], num_machines: usize, num_tokens: i64, chosen: i64) -> Vec<i64> {
    let total = rows.iter().sum::<i64>().max(1) as f64;
    let of_machine = |rows: &[i64]| {
        let share = rows.iter().sum::<i64>() as f64 / total;
        let is_chosen = 1.0 - (1.0 - share).powi(chosen as i32);
        (num_tokens as f64 * is_chosen).round() as i64
    };
    let each = rows.len() / num_machines;
    rows.chunks(each.max(1)).map(of_machine).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_go_to_a_machine_once() {
        // Two of four experts on two machines: three of four tokens go to either.
        assert_eq!(expected_tokens(&[50, 50, 50, 50], 2, 100, 2), [75, 75]);
        // All to the first machine.
        assert_eq!(expected_tokens(&[100, 100, 0, 0], 2, 100, 2), [100, 0]);
        // One expert each: nothing is saved.
        assert_eq!(expected_tokens(&[25; 4], 4, 100, 1), [25; 4]);
    }
}
