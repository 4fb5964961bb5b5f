//! Which units of a model share a flat parameter.

use std::ops::Range;

use trainyard_nn::Unit;

/// Which consecutive units are gathered, released and reduced together, in one flat parameter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum WrapPolicy {
    /// Every unit has its own, as with PyTorch's `fully_shard` on each of them.
    #[default]
    EveryUnit,
    /// Units are merged up to this number of bytes, as they are reduced: fewer and larger collectives, more memory in stage 3.
    MaxBytes(u64),
    /// Units are merged until they have at least this number of parameters, as with PyTorch's `size_based_auto_wrap_policy`.
    MinParameters(u64),
    /// Every unit of one of these types has its own, and the others between them are merged, as with PyTorch's
    /// `ModuleWrapPolicy`. A type is named by the end of its path, as in `TransformerBlock`.
    Types(Vec<String>),
}

/// What a policy looks at.
#[derive(Debug, Clone)]
pub(crate) struct UnitSize {
    pub type_name: &'static str,
    pub num_parameters: u64,
    pub bytes: u64,
}

impl UnitSize {
    pub(crate) fn of(unit: &dyn Unit, bytes: u64) -> UnitSize {
        UnitSize {
            type_name: unit.type_name(),
            num_parameters: unit.num_parameters(),
            bytes,
        }
    }
}

impl WrapPolicy {
    /// The groups of consecutive units.
    pub(crate) fn groups(&self, units: &[UnitSize]) -> Vec<Range<usize>> {
        let mut groups: Vec<Range<usize>> = Vec::new();
        for (index, unit) in units.iter().enumerate() {
            match groups.last_mut() {
                Some(group) if self.joins(&units[group.clone()], unit) => group.end = index + 1,
                _ => groups.push(index..index + 1),
            }
        }
        groups
    }

    /// Whether `next` joins the group of units before it.
    fn joins(&self, group: &[UnitSize], next: &UnitSize) -> bool {
        match self {
            WrapPolicy::EveryUnit => false,
            WrapPolicy::MaxBytes(limit) => {
                let bytes: u64 = group.iter().map(|unit| unit.bytes).sum();
                bytes + next.bytes <= *limit
            }
            WrapPolicy::MinParameters(minimum) => {
                let number: u64 = group.iter().map(|unit| unit.num_parameters).sum();
                number < *minimum
            }
            WrapPolicy::Types(names) => {
                let is_named =
                    |unit: &UnitSize| names.iter().any(|name| is_type(unit.type_name, name));
                !is_named(next) && !group.iter().any(is_named)
            }
        }
    }
}

/// Whether a path such as `my_crate::blocks::Block<f32>` ends with this name.
fn is_type(path: &str, name: &str) -> bool {
    let path = path.split('<').next().unwrap_or(path);
    path == name || path.ends_with(&format!("::{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn unit(type_name: &'static str, number: u64) -> UnitSize {
        UnitSize {
            type_name,
            num_parameters: number,
            bytes: 4 * number,
        }
    }

    #[test]
    fn units_of_a_type_are_alone() {
        let units = [
            "a::Embed",
            "a::Pos",
            "a::Block",
            "a::Block<B>",
            "a::Norm",
            "a::Head",
        ];
        let units = units.map(|name| unit(name, 1));
        let groups = WrapPolicy::Types(vec!["Block".to_owned()]).groups(&units);
        assert_eq!(groups, [0..2, 2..3, 3..4, 4..6]);
        assert!(!is_type("a::SubBlock", "Block"));
    }

    proptest! {
        #[test]
        fn groups_cover_all_units_and_keep_their_bound(
            numbers in prop::collection::vec(0u64..100, 0..40),
            bound in 1u64..1200,
        ) {
            let units: Vec<UnitSize> = numbers.iter().map(|&number| unit("a::Block", number)).collect();
            let sum = |group: &Range<usize>| numbers[group.clone()].iter().sum::<u64>();
            let within = WrapPolicy::MaxBytes(bound).groups(&units);
            prop_assert!(within.iter().all(|group| group.len() == 1 || 4 * sum(group) <= bound));
            let at_least = WrapPolicy::MinParameters(bound).groups(&units);
            let all_but_last = &at_least[..at_least.len().saturating_sub(1)];
            prop_assert!(all_but_last.iter().all(|group| sum(group) >= bound));
            for groups in [within, at_least] {
                prop_assert!(groups.into_iter().flatten().eq(0..numbers.len()));
            }
        }
    }
}
