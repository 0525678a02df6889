# Fits crossed random intercepts with lme4 or glmmTMB and prints JSON.
#
#   Rscript crossed.R FILE METHOD
#
# FILE is a CSV table with the response y and the factors s and d; METHOD is lmer (normal responses), glmer, glmer0 (with
# nAGQ = 0) or glmmTMB (binary ones).

arguments <- commandArgs(trailingOnly = TRUE)
method <- arguments[[2]]
package <- if (method == "glmmTMB") "glmmTMB" else "lme4"
suppressWarnings(suppressPackageStartupMessages(library(package, character.only = TRUE)))
data <- read.csv(arguments[[1]])
data$s <- factor(data$s)
data$d <- factor(data$d)
model <- y ~ (1 | s) + (1 | d)

start <- proc.time()
fit <- switch(method,
  lmer = lmer(model, data = data),
  glmer = glmer(model, data = data, family = binomial()),
  glmer0 = glmer(model, data = data, family = binomial(), nAGQ = 0),
  glmmTMB = glmmTMB(model, data = data, family = binomial())
)
taken <- proc.time() - start

intercept <- if (package == "lme4") fixef(fit) else fixef(fit)$cond
parts <- if (package == "lme4") VarCorr(fit) else VarCorr(fit)$cond
cat(sprintf(
  '{"seconds": %.3f, "processor_seconds": %.3f, "intercept": %.6g, "sd_s": %.6g, "sd_d": %.6g, "noise": %.6g}\n',
  taken[["elapsed"]], sum(taken[c("user.self", "sys.self")]), intercept[[1]],
  attr(parts$s, "stddev")[[1]], attr(parts$d, "stddev")[[1]], sigma(fit)
))
