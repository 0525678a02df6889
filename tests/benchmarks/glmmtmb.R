# Fits a regression with effects of groups with glmmTMB (Laplace approximation, its default) and prints JSON.
#
#   Rscript glmmtmb.R FILE [FAMILY [EFFECTS]]
#
# FILE is a CSV table with the response y, the grouping column g, and the predictors; an intercept is added. FAMILY is
# binomial by default, EFFECTS "(1 | g)".

arguments <- commandArgs(trailingOnly = TRUE)
clock <- function() proc.time()[["elapsed"]]
processor <- function() sum(proc.time()[c("user.self", "sys.self")])

start <- clock()
suppressWarnings(suppressPackageStartupMessages(library(glmmTMB)))
seconds_library <- clock() - start

start <- clock()
data <- read.csv(arguments[[1]])
data$g <- factor(data$g)
seconds_read <- clock() - start

predictors <- setdiff(names(data), c("y", "g"))
family <- if (length(arguments) > 1) arguments[[2]] else "binomial"
effects <- if (length(arguments) > 2) arguments[[3]] else "(1 | g)"
formula <- as.formula(paste("y ~", paste(c(predictors, effects), collapse = " + ")))
start <- clock()
start_processor <- processor()
fit <- glmmTMB(formula, data = data, family = get(family)())
seconds <- clock() - start
seconds_processor <- processor() - start_processor

peak <- NA
if (file.exists("/proc/self/status")) {
  line <- grep("^VmHWM", readLines("/proc/self/status"), value = TRUE)
  peak <- as.numeric(gsub("[^0-9]", "", line)) / 1024
}
estimates <- fixef(fit)$cond
# Beside the fixed effects: the log standard deviation of the first random effect.
log_sd <- fit$fit$par[["theta"]]
errors <- sqrt(diag(fit$sdr$cov.fixed))
array <- function(x) paste0("[", paste(sprintf("%.10g", x), collapse = ", "), "]")
strings <- function(x) paste0("[", paste0("\"", x, "\"", collapse = ", "), "]")
cat(sprintf(
  paste0(
    '{"names": %s, "estimates": %s, "errors": %s, "log_sd": %.10g, "log_sd_error": %.10g, "log_likelihood": %.10g, ',
    '"converged": %s, "seconds": %.3f, "seconds_processor": %.3f, "seconds_library": %.3f, "seconds_read": %.3f, "peak_mib": %s, "version": "%s"}\n'
  ),
  strings(names(estimates)), array(estimates), array(errors[seq_along(estimates)]), log_sd,
  errors[[length(errors)]], as.numeric(logLik(fit)), tolower(as.character(fit$fit$convergence == 0)), seconds,
  seconds_processor, seconds_library, seconds_read, ifelse(is.na(peak), "null", sprintf("%.1f", peak)),
  paste0("R ", getRversion(), ", glmmTMB ", packageVersion("glmmTMB"), ", TMB ", packageVersion("TMB"))
))
