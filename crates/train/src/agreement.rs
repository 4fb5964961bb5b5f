//! Whether ranks have the same numbers.

use tch::{Device, Kind, Tensor};
use trainyard_torch::Group;
use trainyard_trace::Purpose;

use crate::Result;

/// The numbers of all ranks of a group, one rank after another. This is a collective call.
pub(crate) fn gather(group: &Group, own: &[i64]) -> Result<Vec<i64>> {
    let input = Tensor::f_from_slice(own)?;
    let size = (group.size() * own.len()) as i64;
    let out = Tensor::f_zeros([size], (Kind::Int64, Device::Cpu))?;
    let work = group.all_gather(&out, &input, Purpose::Control)?;
    work.wait()?;
    Ok(Vec::<i64>::try_from(&out)?)
}

/// The positions of numbers that differ from the majority; all of them if there is no majority.
pub(crate) fn outliers(numbers: &[i64]) -> Vec<usize> {
    let count = |number: &i64| numbers.iter().filter(|other| *other == number).count();
    let Some(common) = numbers.iter().max_by_key(|number| count(number)) else {
        return Vec::new();
    };
    let has_majority = 2 * count(common) > numbers.len();
    (0..numbers.len())
        .filter(|&rank| !has_majority || numbers[rank] != *common)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_that_differs_is_named() {
        assert_eq!(outliers(&[5, 5, 5, 5]), [0usize; 0]);
        assert_eq!(outliers(&[5, 5, 7, 5]), [2]);
        assert_eq!(outliers(&[5, 7]), [0, 1]);
        assert_eq!(outliers(&[5]), [0usize; 0]);
    }
}
