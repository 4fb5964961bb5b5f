//! `#[derive(Module)]`: the parameters of a struct are those of its fields, in declaration order.
//!
//! A field marked `#[module(skip)]` is skipped: a parameter that another module owns, or a type that is not a module.
//! The macro finds the trait through the crate's dependency on `trainyard-nn`, or else on `trainyard`; a crate that
//! has it under another path gives the path with `#[module(crate = path)]` on the struct.

use proc_macro::TokenStream;
use proc_macro_crate::{FoundCrate, crate_name};
use proc_macro2::TokenStream as Tokens;
use quote::{format_ident, quote, quote_spanned};
use syn::{
    Attribute, Data, DeriveInput, Error, Field, Fields, Path, Result, parse_macro_input,
    parse_quote, spanned::Spanned,
};

/// Implements `Module` for a struct with named fields by visiting each field.
#[proc_macro_derive(Module, attributes(module))]
pub fn derive_module(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    implement(&input)
        .unwrap_or_else(Error::into_compile_error)
        .into()
}

fn implement(input: &DeriveInput) -> Result<Tokens> {
    let root = crate_path(&input.attrs)?;
    let visits = visits(input, &root)?;

    let mut generics = input.generics.clone();
    for parameter in generics.type_params_mut() {
        parameter.bounds.push(parse_quote!(#root::Module));
    }
    let (impl_generics, type_generics, where_clause) = generics.split_for_impl();
    let name = &input.ident;
    Ok(quote! {
        #[automatically_derived]
        impl #impl_generics #root::Module for #name #type_generics #where_clause {
            fn visit(&self, visitor: &mut dyn ::core::ops::FnMut(&#root::Parameter)) {
                let _ = &visitor;
                #(#visits)*
            }
        }
    })
}

fn visits(input: &DeriveInput, root: &Path) -> Result<Vec<Tokens>> {
    let mut visits = Vec::new();
    for field in named_fields(input)? {
        if !is_skipped(field)? {
            let name = &field.ident;
            visits.push(quote_spanned! { field.span() =>
                #root::Module::visit(&self.#name, visitor);
            });
        }
    }
    Ok(visits)
}

fn named_fields(input: &DeriveInput) -> Result<impl Iterator<Item = &Field>> {
    match &input.data {
        Data::Struct(data) => match &data.fields {
            Fields::Named(fields) => Ok(fields.named.iter()),
            _ => Err(unsupported(input)),
        },
        _ => Err(unsupported(input)),
    }
}

fn unsupported(input: &DeriveInput) -> Error {
    Error::new(
        input.ident.span(),
        "Module can be derived only for structs with named fields; implement it by hand",
    )
}

fn is_skipped(field: &Field) -> Result<bool> {
    let mut skipped = false;
    for attribute in module_attributes(&field.attrs) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("skip") {
                skipped = true;
                Ok(())
            } else {
                Err(meta.error("unknown field attribute: did you mean `skip`?"))
            }
        })?;
    }
    Ok(skipped)
}

fn crate_path(attributes: &[Attribute]) -> Result<Path> {
    let mut path = default_path(&|package| match crate_name(package).ok()? {
        FoundCrate::Itself => Some(package.replace('-', "_")),
        FoundCrate::Name(name) => Some(name),
    });
    for attribute in module_attributes(attributes) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("crate") {
                path = meta.value()?.call(Path::parse_mod_style)?;
                Ok(())
            } else {
                Err(meta.error("unknown struct attribute: did you mean `crate = path`?"))
            }
        })?;
    }
    Ok(path)
}

/// The path of `trainyard-nn` in the using crate; `name_of` returns the crate's name of a package.
fn default_path(name_of: &dyn Fn(&str) -> Option<String>) -> Path {
    if let Some(name) = name_of("trainyard-nn") {
        let name = format_ident!("{name}");
        return parse_quote!(::#name);
    }
    match name_of("trainyard").map(|name| format_ident!("{name}")) {
        Some(name) => parse_quote!(::#name::nn),
        // Without either, the compiler's error about the missing crate is the clearest.
        None => parse_quote!(::trainyard_nn),
    }
}

fn module_attributes(attributes: &[Attribute]) -> impl Iterator<Item = &Attribute> {
    attributes
        .iter()
        .filter(|attribute| attribute.path().is_ident("module"))
}

#[cfg(test)]
mod tests {
    use quote::ToTokens;

    use super::*;

    fn path(known: &[(&str, &str)]) -> String {
        let name_of = |package: &str| {
            let found = known.iter().find(|(name, _)| *name == package);
            found.map(|(_, name)| name.to_string())
        };
        let tokens = default_path(&name_of).to_token_stream().to_string();
        tokens.replace(' ', "")
    }

    #[test]
    fn the_trait_is_found_through_either_crate_under_any_name() {
        assert_eq!(path(&[("trainyard-nn", "trainyard_nn")]), "::trainyard_nn");
        assert_eq!(path(&[("trainyard-nn", "yard")]), "::yard");
        assert_eq!(path(&[("trainyard", "trainyard")]), "::trainyard::nn");
        let both = [("trainyard", "trainyard"), ("trainyard-nn", "trainyard_nn")];
        assert_eq!(path(&both), "::trainyard_nn");
        assert_eq!(path(&[]), "::trainyard_nn");
    }
}
